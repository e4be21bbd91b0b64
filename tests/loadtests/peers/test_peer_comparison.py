import contextlib
import dataclasses
import http.server
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs import render
from loadtests.peers.comparison import (
    Cell,
    PeerComparison,
    PeerPlan,
    answers,
    median_and_extremes,
    ratio,
    spread_of,
    tree,
    under_load,
)
from loadtests.peers.servers import OURS, SERVERS, Exchange, PeerError, Sample, Server, samples
from loadtests.peers.wrk import LoadError, WrkResult
from loadtests.report.points import Spread
from loadtests.server_process import free_port
from tests.loadtests import fork_server

ROOT = Path(__file__).parents[3]
with_wrk = pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
# The other servers are told their one wire when they start.
STARTS = [
    (OURS, ("json", "binary")),
    *((name, (wire,)) for name in SERVERS if name != OURS for wire in SERVERS[name].wires),
]


def load(requests_per_s: float) -> WrkResult:
    return WrkResult(round(requests_per_s * 2), 2_000_000, 1000, 2000, 3000, 4000, {}, 0.5)


def cell(server: str, *rates: float | None, failure: str | None = None) -> Cell:
    loads = {number: load(rate) for number, rate in enumerate(rates) if rate is not None}
    return Cell(server, "digits", "json", 8, loads, failure)


@pytest.fixture(scope="module")
def digits() -> tuple[Sample, Sample]:
    return samples("digits", 3)


def test_a_spread_is_the_median_and_the_extremes() -> None:
    assert median_and_extremes(spread_of([3.0, 1.0, 7.0])) == {"median": 3.0, "min": 1.0, "max": 7.0}
    assert median_and_extremes(spread_of([])) is None


def test_a_ratio_is_taken_within_each_round() -> None:
    # Twice as fast in each round, while the host's speed drifts: a ratio of medians would say 1.
    assert ratio(cell(OURS, 200, 2000, 20), cell("mosec", 100, 1000, 10)) == Spread.of([2.0, 2.0, 2.0])
    assert ratio(cell(OURS, 100, 400), cell("mosec", 100, 100)) == Spread.of([1.0, 4.0])


def test_a_round_that_one_of_the_two_lacks_has_no_ratio() -> None:
    assert ratio(cell(OURS, 100, None, 300), cell("mosec", None, 10, 100)) == Spread.of([3.0])
    assert ratio(cell(OURS, 100), cell("mosec", None, 10)) is None


@pytest.mark.parametrize("ours", [None, cell(OURS, 100, failure="it died")], ids=["not measured", "failed"])
def test_without_this_server_s_figures_there_is_no_ratio(ours: Cell | None) -> None:
    assert ratio(ours, cell("mosec", 100)) is None


def test_a_cell_tells_its_medians_over_the_rounds() -> None:
    document = cell("mosec", 100, 300, 200).document(cell(OURS, 200, 300, 100))
    assert document["requests_per_s"] == {"median": 200, "min": 100, "max": 300}
    assert document["ratio"] == {"median": 1, "min": 0.5, "max": 2}
    assert document["p99_ms"]["median"] == 3
    assert [each["round"] for each in document["loads"]] == [0, 1, 2]


def test_a_failed_cell_keeps_its_loads_and_tells_no_figures() -> None:
    document = cell("mosec", 100, failure="round 2: a wrong answer").document(cell(OURS, 200))
    assert document["failure"] == "round 2: a wrong answer"
    assert document["requests_per_s"] is document["ratio"] is None
    assert len(document["loads"]) == 1


def test_the_page_tells_figures_ratios_losses_and_failures(tmp_path: Path) -> None:
    plan = PeerPlan((OURS, "mosec", "bentoml"), ("digits",), ("json", "binary"), (8,), rounds=2, seconds=5, rows=1)
    comparison = PeerComparison(plan, {}, tmp_path)
    for wire in plan.wires:
        comparison.cells[OURS, "digits", wire, 8].loads = {0: load(100), 1: load(300)}
        comparison.cells["mosec", "digits", wire, 8].loads = {0: load(200), 1: load(200)}
    comparison.cells["bentoml", "digits", "json", 8].failure = "round 1: it died"
    comparison.starts[OURS, "digits", "json"].seconds = [1.0, 3.0]
    conditions = {"servers": {"mosec": "mosec 1.2", "bentoml": "BentoML 3.4"}, "backend": "fused", "threads": 2}
    conditions |= {"processor": "a CPU", "cores": 2, "wrk": "4.1", "python": "3.11", "torch": "2.13", "commit": "abc"}
    document = {"peers": comparison.document(), "conditions": conditions, "ended_early": "interrupted"}
    text = render.peers(json.loads(json.dumps(document)))
    assert "| this server | 2.0 s | — | 200/s; 1, 3 ms |" in text
    assert "| mosec 1.2 | — | — | 200/s; 1, 3 ms; 1.00 (0.50 to 1.50) |" in text
    assert "| BentoML 3.4 | — | — | failed |" in text
    assert "| BentoML 3.4 | — | — | no such wire |" in text
    assert "- bentoml, digits, json, connections 8: round 1: it died" in text
    assert "Medians of 2 rounds of 5 s, 1 row a request, backend `fused`, 2 threads; a CPU, 2 cores" in text
    assert text.endswith("Not whole: interrupted.\n")


def test_the_page_says_where_the_generator_was_the_limit() -> None:
    busy = cell(OURS, 100, 200)
    busy.loads[1] = dataclasses.replace(load(200), generator_cpu=0.9)
    assert render.peers_cell(busy.document(None)) == "150/s; 1, 3 ms; wrk was the limit"


def test_other_outputs_than_the_expected_are_a_wrong_answer() -> None:
    sample = Sample("m", np.zeros((1, 2), np.float32), np.asarray([[1.0, -2.0]], np.float32))
    sample.require(np.asarray([[1.0005, -2.0]], np.float32))
    for wrong in ([[1.1, -2.0]], [[float("nan"), -2.0]]):
        with pytest.raises(PeerError, match="a wrong answer: outputs are off by up to"):
            sample.require(np.asarray(wrong, np.float32))
    with pytest.raises(PeerError, match=r"expected outputs of shape \(1, 2\), got \(2,\)"):
        sample.require(np.asarray([1.0, -2.0], np.float32))


def test_the_two_samples_differ_in_every_row(digits: tuple[Sample, Sample]) -> None:
    loaded, checked = digits
    assert loaded.inputs.shape == checked.inputs.shape == (3, 64)
    with pytest.raises(PeerError, match="a wrong answer"):
        loaded.require(checked.outputs)


def test_a_model_that_is_not_there_is_named() -> None:
    with pytest.raises(PeerError, match=r"--models nowhere: .*neither"):
        samples("nowhere", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wires"), STARTS, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_a_server_answers_the_expected_rows_and_leaves_no_process(
    name: str, wires: tuple[str, ...], digits: tuple[Sample, Sample], tmp_path: Path
) -> None:
    server, log = SERVERS[name], tmp_path / "log"
    if server.missing:
        pytest.skip(server.missing)
    with free_port() as port, tree(server, "digits", wires[0], 3, port, log) as started:
        for wire in wires:
            loaded, checked = (server.exchange(wire, sample) for sample in digits)
            started.wait(lambda: answers(checked, port), 120)  # noqa: B023  called before the next one
            loaded.check(port)
        processes = started.processes()
        assert started.memory_bytes() > 10 << 20
    assert processes
    assert [each for each in processes if each.is_running()] == [], log.read_text()


@pytest.mark.slow
def test_a_server_that_does_not_start_is_reported_and_is_not_tried_again(
    tmp_path: Path, digits: tuple[Sample, Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SERVERS, "broken", Server("broken", "nothing", sys.executable, "loadtests.peers.nothing"))
    plan = PeerPlan(("broken",), ("digits",), ("json",), (1, 2), rounds=2, seconds=1, rows=3)
    comparison = PeerComparison(plan, {"digits": digits}, tmp_path / "logs")
    assert len(list(comparison.run())) == 2
    (reason,) = {each.failure for each in comparison.failures}
    assert reason is not None
    assert reason.startswith("it ended with status 1 before it answered; its last words: ")
    assert reason.endswith("No module named loadtests.peers.nothing")
    assert (tmp_path / "logs/broken-digits-json.log").read_text() != ""
    assert [each["failure"] for each in comparison.document()["cells"]] == [reason, reason]


@contextlib.contextmanager
def answering(reply: Callable[[bool], tuple[int, bytes]]) -> Iterator[int]:
    """Serve what `reply` makes of whether a request is wrk's; yield the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            status, body = reply("accept-encoding" not in self.headers)
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def exchanges(pair: tuple[Sample, Sample]) -> tuple[Exchange, Exchange]:
    loaded, checked = (SERVERS["mosec"].exchange("binary", each) for each in pair)
    return loaded, checked


@with_wrk
@pytest.mark.slow
def test_a_server_that_mixes_up_its_callers_under_load_is_found_out(digits: tuple[Sample, Sample]) -> None:
    right = digits[0].outputs.tobytes()
    with answering(lambda _: (200, right)) as port, pytest.raises(PeerError, match="under the load: a wrong answer"):
        under_load(port, 2, 1, *exchanges(digits))


@with_wrk
@pytest.mark.slow
def test_an_error_reply_under_load_is_a_failure(digits: tuple[Sample, Sample]) -> None:
    def reply(is_load: bool) -> tuple[int, bytes]:
        return (503 if is_load else 200), digits[0].outputs.tobytes()

    loaded, _ = exchanges(digits)
    with answering(reply) as port, pytest.raises(LoadError, match=r"[0-9] replies with a status of 400 or above"):
        under_load(port, 2, 1, loaded, loaded)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run_loadtests("peers", *arguments, environment=os.environ | environment)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--servers", "apache"), "--servers: expected some of ours, litserve"),
        (("--wires", "grpc"), "--wires: expected some of json, binary, got 'grpc'"),
        (("--connections", "1,none"), "--connections: expected a whole number from 1 to 65536, got 'none'"),
        (("--rounds", "0"), "--rounds: expected a whole number from 1 to 1000, got '0'"),
    ],
    ids=["servers", "wires", "connections", "rounds"],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    done = run(*arguments, "--json", str(tmp_path / "peers.json"))
    assert done.returncode == 2
    assert f"error: argument {message}" in done.stderr


def test_a_folder_that_is_not_there_is_refused_before_anything_starts() -> None:
    done = run("--json", "/nowhere/at/all.json")
    assert done.returncode == 2
    assert done.stderr == "error: --json /nowhere/at/all.json: there is no directory /nowhere/at\n"


def test_without_wrk_it_is_said_what_to_install(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "peers.json"), PATH="/nowhere")
    assert done.returncode == 2
    assert done.stderr.startswith("error: wrk, the load generator, is not on PATH; install it")


@with_wrk
@pytest.mark.slow
def test_a_comparison_writes_figures_conditions_and_ratios(tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    done = run("--servers", "ours,litserve", "--models", "digits", "--wires", "binary", "--connections", "2",
               "--rounds", "1", "--seconds", "1", "--json", str(file))  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    ours, litserve = document["peers"]["cells"]
    assert ours["ratio"]["median"] == 1
    assert litserve["ratio"]["median"] == pytest.approx(
        ours["requests_per_s"]["median"] / litserve["requests_per_s"]["median"], rel=1e-3
    )
    assert {each["server"] for each in document["peers"]["starts"]} == {"ours", "litserve"}
    assert all(each["memory_mib"]["median"] > 10 for each in document["peers"]["starts"])
    assert document["conditions"]["servers"]["litserve"].startswith("stock LitServe 0.")
    assert {"processor", "cores", "commit", "wrk", "backend", "threads"} <= set(document["conditions"])
    assert document["command"][:6] == ["python", "-m", "loadtests", "peers", "--servers", "ours,litserve"]
    assert document["ended_early"] is None
    assert "ours / theirs" in done.stdout
