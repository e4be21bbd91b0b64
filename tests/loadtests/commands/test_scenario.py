"""`scenario` against a real server, in processes of its own."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.loadtests.commands.test_compare import LIMIT_S, environment
from tests.service.running_server import ROOT, RunningServer

pytestmark = pytest.mark.slow  # a real server under load


def ends(out: Path, server: RunningServer) -> list[str]:
    return ["--out", str(out), "--url", server.url, "--server-pid", str(server.process.pid)]


def scenario(out: Path, server: RunningServer, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtests", "scenario", *arguments, *ends(out, server)]
    return subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


def verdicts(out: Path) -> dict[str, dict[str, Any]]:
    return {each["what"]: each for each in json.loads((out / "scenario.json").read_text())["verdicts"]}


def test_an_objective_that_is_kept_to_passes(server: RunningServer, tmp_path: Path) -> None:
    flags = ("--seconds", "1", "--users", "2", "--objective-ms", "5000", "--max-memory-growth", "1")
    done = scenario(tmp_path, server, "soak", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(verdicts(tmp_path)) == {"p99", "errors", "generator at its limit", "memory growth"}
    assert done.stdout.count(" pass\n") == 4
    document = json.loads((tmp_path / "scenario.json").read_text())
    assert document["command"] == ["python", "-m", "loadtests", "scenario", "soak", *flags, *ends(tmp_path, server)]
    assert (document["seed"], document["users"], document["rate_per_s"]) == (0, 2, None)
    assert (document["objective_ms"], document["seconds"], document["model"]) == (5000, 1, "digits")
    assert datetime.fromisoformat(document["started"]) <= datetime.now(UTC)
    assert not list(tmp_path.glob("*.part"))
    assert (tmp_path / "locust.html").stat().st_size > 0


def test_an_objective_that_is_missed_fails(server: RunningServer, tmp_path: Path) -> None:
    flags = ("--seconds", "1", "--rate", "50", "--objective-ms", "0.001", "--min-goodput", "1")
    done = scenario(tmp_path, server, "steady", *flags)
    assert done.returncode == 1
    assert {line.split()[0] for line in done.stdout.splitlines() if line.endswith("FAIL")} >= {"p99", "goodput"}


def test_a_spike_of_arrivals_brings_a_fifth_before_and_after(server: RunningServer, tmp_path: Path) -> None:
    done = scenario(tmp_path, server, "spike", "--seconds", "2", "--rate", "200", "--objective-ms", "5000")
    (run,) = json.loads((tmp_path / "scenario.json").read_text())["runs"]
    assert done.returncode in (0, 1), done.stderr
    assert run["sent"] == pytest.approx(2 * 200 * (0.2 + 0.8 * 0.2), rel=0.3)


def test_users_of_a_shape_come_and_go_in_every_process(server: RunningServer, tmp_path: Path) -> None:
    flags = ("--seconds", "1", "--users", "4", "--objective-ms", "5000", "--processes", "2")
    done = scenario(tmp_path, server, "ramp", *flags)
    assert done.returncode == 0, done.stdout + done.stderr


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
    assert done.returncode == 0, done.stdout + done.stderr
    assert {what for what in verdicts(tmp_path) if what.startswith("p99 of")} == {f"p99 of {kind}" for kind in kinds}


def test_an_overload_is_three_times_what_the_server_answers(server: RunningServer, tmp_path: Path) -> None:
    done = scenario(tmp_path, server, "overload", "--seconds", "1", "--rows", "512", "--wire", "binary")
    assert done.returncode in (0, 1), done.stderr
    found = json.loads((tmp_path / "scenario.json").read_text())["overload"]
    assert found["offered_per_s"] == pytest.approx(3 * found["capacity_per_s"])
    assert found["refused"] > 0
    assert found["refusal_p50_ms"] <= found["refusal_p99_ms"]
    assert found["recovery_s"] > 0
    assert found["memory_growth"] is not None
    assert {"p99 of what was accepted", "goodput", "recovery", "memory growth"} <= set(verdicts(tmp_path))
    assert ("FAIL" in done.stdout) == (done.returncode == 1)


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
