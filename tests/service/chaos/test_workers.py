"""Workers that die while they compute, several of them behind several HTTP processes, and workers that cannot start."""

import functools
import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.made_model import write_made_model
from tests.service.running_server import HeldServer, RunningServer, Start, is_alive

pytestmark = pytest.mark.slow  # real servers

WIDTH = 8
STATUSES = ("200", "503")


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeldServer]:
    """Two workers behind two HTTP processes."""
    place = tmp_path_factory.mktemp("several")
    directory = write_made_model(place, "tiny", dim=WIDTH, hidden=16, depth=1)
    flags = ("--model", str(directory), "--backends", "eager", "--workers", "2", "--api-servers", "2")
    server = HeldServer(place / "log", *flags, HOLD=str(place / "hold"))
    try:
        yield server.wait_ready()
        assert server.stop() == 0
    finally:
        server.end()


class Counts:
    """What the server counts, since this began."""

    def __init__(self, server: RunningServer) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> Counter[str]:
        counts = Counter({status: int(self._server.metric("mlp_requests_total", status=status)) for status in STATUSES})
        counts["restarts"] = int(self._server.metric("mlp_worker_restarts_total"))
        return counts

    def __getitem__(self, name: str) -> int:
        return self._now()[name] - self._before[name]


def small(server: RunningServer) -> httpx.Response:
    return httpx.post(server.url + "/predict", json={"inputs": [0.5] * WIDTH}, timeout=60)


def outcome(reply: httpx.Response) -> str:
    return "answered" if reply.status_code == 200 else f"{reply.status_code} {reply.json()['code']}"


def test_a_worker_killed_in_mid_batch_takes_its_own_requests_and_no_others_along(several: RunningServer) -> None:
    victim, other = several.pids_of("worker")
    counts, accepted = Counts(several), several.accepted()
    hold = several.log.with_name("hold")
    hold.write_text(str(victim))
    replies: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: replies.append(small(several))) for _ in range(4)]
    try:
        with several.all_stopped("worker"):  # so that an HTTP process which has two requests gives one to each
            for thread in threads:
                thread.start()
            several.wait_until(lambda: several.accepted() == accepted + 4)
        several.wait_until(hold.with_suffix(".held").exists)
        os.kill(victim, signal.SIGKILL)
        several.wait_until(lambda: several.answers("/v2/health/ready", 503))  # the next one is held before it is ready
        for thread in threads:
            thread.join()
        outcomes = Counter(outcome(reply) for reply in replies)
        assert set(outcomes) == {"answered", "503 worker_lost"}, outcomes
        assert {reply.headers.get("retry-after") for reply in replies if reply.status_code == 503} == {"1"}
        assert {small(several).status_code for _ in range(8)} == {200}  # each HTTP process still has the other worker
    finally:
        hold.unlink()
    several.wait_until(lambda: several.answers("/v2/health/ready", 200))
    assert (counts["200"], counts["503"]) == (outcomes["answered"] + 8, outcomes["503 worker_lost"])
    assert (several.metric("mlp_inflight_requests"), several.metric("mlp_queue_rows")) == (0, 0)
    assert counts["restarts"] == 1
    assert not is_alive(victim)
    assert is_alive(other)


def test_when_every_worker_is_killed_everything_is_answered_and_all_come_back(several: RunningServer) -> None:
    several.wait_until(lambda: several.answers("/v2/health/ready", 200))
    counts, accepted = Counts(several), several.accepted()
    replies: list[httpx.Response] = []
    with several.all_stopped("worker") as workers:
        threads = [threading.Thread(target=lambda: replies.append(small(several))) for _ in range(24)]
        for thread in threads:
            thread.start()
        several.wait_until(lambda: several.accepted() == accepted + 24)
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    assert {outcome(reply) for reply in replies} == {"503 worker_lost"}
    meanwhile = small(several)
    assert outcome(meanwhile) in ("answered", "503 not_ready")
    several.wait_until(lambda: counts["restarts"] == 2)
    several.wait_until(lambda: several.answers("/v2/health/ready", 200))
    assert {small(several).status_code for _ in range(8)} == {200}
    assert counts["503"] == 24 + (meanwhile.status_code == 503)
    assert several.metric("mlp_inflight_requests") == 0


def test_workers_share_the_cores_out_by_default(several: RunningServer) -> None:
    from models.control_group import available_cores

    (threads,) = re.findall(r"2 worker\(s\) of (\d+) thread", several.output)
    assert 1 <= 2 * int(threads) <= max(2, available_cores())


class LostDeviceServer(RunningServer):
    """A server whose device is lost when told."""

    program = ("-m", "tests.service.chaos.lost_device_server")


def test_a_device_that_is_lost_ends_its_worker_with_one_line_and_the_next_one_answers(
    tiny_model: Path, tmp_path: Path
) -> None:
    order = tmp_path / "lose"
    server = LostDeviceServer(
        tmp_path / "log", "--model", str(tiny_model), "--backends", "eager,fused", LOSE=str(order)
    ).wait_ready()
    try:
        first = server.pid_of("worker")
        ask = functools.partial(httpx.post, server.url + "/predict", json={"inputs": [0.5] * 8}, timeout=60)
        assert ask().status_code == 200
        order.touch()
        assert outcome(ask()) == "503 worker_lost"
        server.wait_until(lambda: server.metric("mlp_worker_restarts_total") == 1)
        server.wait_until(lambda: server.answers("/v2/health/ready", 200))
        assert not is_alive(first)
        assert (ask().status_code, ask().headers["x-backend"]) == (200, "fused")  # nothing was taken out
        (line,) = [line for line in server.output.splitlines() if "AcceleratorError" in line]
        assert "worker 0 ends, to be started anew: cpu fails every call of this process from now on" in line
        assert "Traceback" not in server.output
        assert server.stop() == 0
    finally:
        server.end()


def test_a_worker_that_dies_while_it_starts_ends_the_start_with_its_reason(tiny_model: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    server = HeldServer(tmp_path / "log", "--model", str(tiny_model), "--backends", "eager", HOLD=str(hold))
    try:
        server.wait_until(lambda: "warming up" in server.output)
        os.kill(server.pid_of("worker"), signal.SIGKILL)
        assert server.wait_exit() == 1
        assert "error: worker 0 ended while starting, with signal 9\n" in server.output
        assert server.pids_of("worker") == []
    finally:
        server.end()


def test_a_model_that_no_memory_holds_ends_the_start_with_its_reason(start: Start, tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps(config | {"dim": 1 << 20, "hidden": 1 << 20}))
    server = start("--model", str(tiny_model), "--backends", "eager")
    assert server.wait_exit() == 2
    (line,) = [line for line in server.output.splitlines() if line.startswith("error:")]
    assert "memory" in line
