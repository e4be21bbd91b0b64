"""`scenario` against a real server, in processes of its own."""

import json
import os
import subprocess
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.loadtests import fork_server
from tests.loadtests.commands.test_compare import environment
from tests.loadtests.faulty_server import Fault, document, faulty_server
from tests.service.running_server import RunningServer

pytestmark = pytest.mark.slow  # a real server under load


def ends(out: Path, server: RunningServer) -> list[str]:
    return ["--out", str(out), "--url", server.url, "--server-pid", str(server.process.pid), "--warm-up-s", "0.1"]


def scenario(out: Path, server: RunningServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run_loadtests("scenario", *arguments, *ends(out, server), environment=environment())


def passed(done: subprocess.CompletedProcess[str], out: Path) -> dict[str, bool]:
    """Whether each objective was kept to; a host that is busy may bring the generator to its limit."""
    lines = [line for line in done.stdout.splitlines() if line.endswith(("  pass", "  FAIL"))]
    found = {
        what: next(line for line in lines if line.startswith(f"{what}  ")).endswith("pass") for what in verdicts(out)
    }
    assert done.returncode == (0 if all(found.values()) else 1), done.stdout + done.stderr
    return {what: has_passed for what, has_passed in found.items() if what != "generator at its limit"}


def verdicts(out: Path) -> dict[str, dict[str, Any]]:
    return {each["what"]: each for each in json.loads((out / "scenario.json").read_text())["verdicts"]}


def test_an_objective_that_is_kept_to_passes(server: RunningServer, tmp_path: Path) -> None:
    flags = ("--seconds", "1", "--users", "2", "--objective-ms", "5000", "--max-memory-growth", "1")
    done = scenario(tmp_path, server, "soak", *flags)
    assert passed(done, tmp_path) == {"p99": True, "errors": True, "memory growth": True}
    assert "generator at its limit" in verdicts(tmp_path)
    (measured,) = json.loads((tmp_path / "scenario.json").read_text())["runs"]
    assert "2 users: " in done.stdout
    assert " requests/s answered, " in done.stdout
    assert measured["invalid"] is None or measured["invalid"] in done.stdout
    document = json.loads((tmp_path / "scenario.json").read_text())
    assert document["command"] == ["python", "-m", "loadtests", "scenario", "soak", *flags, *ends(tmp_path, server)]
    assert (document["seed"], document["users"], document["rate_per_s"]) == (0, 2, None)
    assert (document["objective_ms"], document["seconds"], document["model"]) == (5000, 1, "digits")
    assert document["warm_up_s"] == 0.1
    assert measured["seconds"] == 1
    assert datetime.fromisoformat(document["started"]) <= datetime.now(UTC)
    assert not list(tmp_path.glob("*.part"))
    assert (tmp_path / "locust.html").stat().st_size > 0


def test_an_objective_that_is_missed_fails(server: RunningServer, tmp_path: Path) -> None:
    flags = ("--seconds", "1", "--rate", "50", "--objective-ms", "0.001", "--min-goodput", "1")
    done = scenario(tmp_path, server, "steady", *flags)
    assert passed(done, tmp_path) | {"errors": True} == {"p99": False, "errors": True, "goodput": False}
    assert done.returncode == 1


def test_a_spike_of_arrivals_brings_a_fifth_before_and_after(server: RunningServer, tmp_path: Path) -> None:
    done = scenario(tmp_path, server, "spike", "--seconds", "2", "--rate", "200", "--objective-ms", "5000")
    passed(done, tmp_path)
    (run,) = json.loads((tmp_path / "scenario.json").read_text())["runs"]
    assert run["sent"] == pytest.approx(2 * 200 * (0.2 + 0.8 * 0.2), rel=0.3)


def test_users_of_a_shape_come_and_go_in_every_process(server: RunningServer, tmp_path: Path) -> None:
    flags = ("--seconds", "1", "--users", "4", "--objective-ms", "5000", "--processes", "2")
    done = scenario(tmp_path, server, "ramp", *flags)
    assert passed(done, tmp_path) == {"p99": True, "errors": True}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("mixed-backends", ["fused, 2 rows", "eager, 2 rows"]),
        ("mixed-rows", [f"fused, {rows} rows" for rows in (2, 8, 32, 128)]),
    ],
)
def test_requests_of_every_kind_share_one_stream(
    server: RunningServer, tmp_path: Path, name: str, kinds: list[str]
) -> None:
    flags = ("--seconds", "1", "--users", "3", "--rows", "2", "--backends", "fused,eager", "--objective-ms", "5000")
    done = scenario(tmp_path, server, name, *flags)
    found = passed(done, tmp_path)
    assert found == {"p99": True, "errors": True} | {f"p99 of {kind}": True for kind in kinds}


def test_bytes_that_no_request_asked_for_are_counted_and_fail_the_load(tmp_path: Path) -> None:
    def fault(path: str, number: int, right: bytes) -> bytes | tuple[bytes, ...]:
        return (right, b"stray") if path == "/predict/fused" and number > 1 else right

    with faulty_server(fault) as server:
        flags = ("--backends", "fused", "--rate", "50", "--seconds", "0.3", "--out", str(tmp_path), "--url", server.url)
        done = fork_server.run_loadtests("scenario", "steady", *flags, environment=environment())
    assert done.returncode == 1
    assert "so that no reply can be told from another's; the first: expected nothing between two" in done.stderr
    (run,) = json.loads((tmp_path / "scenario.json").read_text())["runs"]
    assert run["errors"]["unsolicited"] > 0
    assert run["sent"] == run["answered"] + run["errors"].get("bad_reply", 0)
    assert "no reply can be told from another's" in run["invalid"]


def one_at_a_time() -> Fault:
    """A server that computes one request in 5 ms, and refuses what comes meanwhile."""
    computing = threading.Lock()
    full = document({"error": "the queue is full", "code": "overloaded"}, "429 Too Many Requests")

    def fault(path: str, number: int, right: bytes) -> bytes | None:
        if not path.startswith("/v2/models/m/infer"):
            return right
        if not computing.acquire(blocking=False):
            return full
        try:
            time.sleep(0.005)
            return right
        finally:
            computing.release()

    return fault


def test_an_overload_is_three_times_what_the_server_answers_and_what_it_refuses_is_told(tmp_path: Path) -> None:
    flags = ("--seconds", "1", "--rows", "16", "--wire", "binary", "--backends", "fused")
    with faulty_server(one_at_a_time()) as server:
        where = ("--out", str(tmp_path), "--url", server.url, "--server-pid", str(os.getpid()))
        done = fork_server.run_loadtests(
            "scenario", "overload", "--warm-up-s", "0.1", *flags, *where, environment=environment()
        )
    assert set(passed(done, tmp_path)) == {"p99 of what was accepted", "goodput", "recovery", "memory growth"}
    written = json.loads((tmp_path / "scenario.json").read_text())
    found = written["overload"]
    *_, overload, after = written["runs"]
    assert found["offered_per_s"] == pytest.approx(3 * found["capacity_before_per_s"])
    assert found["capacity_after_per_s"] == pytest.approx(after["answered"] / after["seconds"])
    both = (found["capacity_before_per_s"], found["capacity_after_per_s"])
    assert found["capacity_per_s"] == pytest.approx(sum(both) / 2)
    assert found["goodput_share"] == pytest.approx(overload["answered"] / overload["seconds"] / found["capacity_per_s"])
    assert found["refused"] == overload["errors"]["overloaded"] > 0
    assert 0 < found["refusal_p50_ms"] <= found["refusal_p99_ms"]
    assert found["recovery_s"] > 0
    assert found["memory_growth"] is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("unheard-of",), "invalid choice: 'unheard-of'"),
        (("steady", "--users", "2", "--rate", "5"), "not allowed with argument"),
        (("steady", "--max-errors", "2"), "--max-errors: expected a number from 0 to 1, got '2'"),
    ],
    ids=["name", "loop", "share"],
)
def test_what_makes_no_scenario_is_refused(
    server: RunningServer, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = scenario(tmp_path, server, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
