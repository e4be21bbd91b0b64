"""The end under load, with one worker and one HTTP process, and with several."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.running_server import START_LIMIT_S, RunningServer, Start, descendants, is_alive, title

pytestmark = pytest.mark.slow  # real servers

CALLERS = 12


def call_until_refused(server: RunningServer, outcomes: list[str], warm: threading.Barrier) -> None:
    """Send one request after the other, over a connection that is kept, until the server takes no more."""
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for turn in range(100_000):
            try:
                reply = client.post("/predict", json={"inputs": [[0.5] * 8] * 3})
            except httpx.ConnectError:
                outcomes.append("refused")
                return
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):
                outcomes.append("closed")  # while it was idle, just before this one was sent
                return
            except httpx.TransportError as error:
                outcomes.append(f"lost: {error!r}")
                return
            outcomes.append(str(reply.status_code))
            if reply.status_code != 200:
                assert reply.json()["code"] == "draining"
                return
            if turn == 20:
                warm.wait()


@pytest.mark.parametrize("processes", [1, 2], ids=["one of each", "several"])
def test_sigterm_under_load_answers_what_was_accepted_and_leaves_nothing_behind(
    start: Start, tiny_model: Path, processes: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as place:
        several = ("--workers", str(processes), "--api-servers", str(processes))
        flags = ("--model", str(tiny_model), "--backends", "eager", *several, "--log-requests", "--log-format", "json")
        server = start(*flags, TMPDIR=place).wait_ready()
        (sockets,) = Path(place).glob("fused-mlp-*")
        assert len(list(sockets.glob("*.sock"))) == processes
        pids = descendants(server.process.pid)
        told: list[str] = []  # threads that add to one count can lose some
        warm = threading.Barrier(CALLERS + 1)
        callers = [threading.Thread(target=call_until_refused, args=(server, told, warm)) for _ in range(CALLERS)]
        for caller in callers:
            caller.start()
        warm.wait()
        assert server.stop() == 0
        for caller in callers:
            caller.join()
        outcomes = Counter(told)
        assert set(outcomes) <= {"200", "503", "refused", "closed"}, outcomes
        assert outcomes["503"] + outcomes["refused"] + outcomes["closed"] == CALLERS
        assert outcomes["closed"] <= CALLERS // 4, outcomes  # hardly ever one; nearly all, if what is held were dropped
        lines = [json.loads(line) for line in server.output.splitlines() if line.startswith("{")]
        assert "Already not alive" not in server.output  # LitServe, of an HTTP process that ended in order
        logged = Counter(str(line["status"]) for line in lines if line["logger"] == "service.requests")
        assert logged == {status: count for status, count in outcomes.items() if status.isdigit()}
        assert [pid for pid in pids if is_alive(pid)] == []
        assert list(Path(place).iterdir()) == []
        assert not server.is_listening()


def send_until_full(server: RunningServer, deaf: socket.socket, sent: bytes) -> None:
    """Send until the server takes no more: it holds nothing, answers others, and reads none of what waits."""
    deaf.setblocking(False)
    at = looks = 0
    while looks < 10:
        try:
            at = (at + deaf.send(sent[at:])) % len(sent)
            looks = 0
        except BlockingIOError:
            looks = looks + 1 if server.metric("mlp_inflight_requests") == 0 else 0


def test_a_client_that_does_not_read_is_let_go_before_what_waits_is_given_up(start: Start) -> None:
    server = start("--backends", "eager", "--max-queue-rows", "100000").wait_ready()
    body = json.dumps({"inputs": [[1] * 64] * 1024}).encode()
    sent = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    good = json.dumps({"inputs": [1] * 64}).encode()
    waiting = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(good), good)
    with contextlib.ExitStack() as opened:
        deaf, patient = (
            opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(2)
        )
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send_until_full(server, deaf, sent)
        with server.stopped("worker"):
            accepted = server.accepted()
            patient.sendall(waiting)
            server.wait_until(lambda: server.accepted() == accepted + 1)
            server.process.terminate()
            both = select.poll()
            both.register(deaf, 0)  # its end alone
            both.register(patient, select.POLLIN)
            (first, _), *_ = both.poll(60_000)  # in the order above, where both have come by then
            assert first == deaf.fileno()
            reply = b""
            while b'"draining"' not in reply:  # which may come after the head
                more = patient.recv(65536)
                assert more, reply
                reply += more
    assert server.wait_exit() == 0


def test_the_sockets_directory_has_another_name_each_time(start: Start, tiny_model: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as place:
        servers = [start("--model", str(tiny_model), "--backends", "eager", TMPDIR=place) for _ in range(2)]
        servers[0].wait_until(lambda: len(list(Path(place).glob("fused-mlp-*"))) == 2)
        names = [path.name.removeprefix("fused-mlp-") for path in Path(place).glob("fused-mlp-*")]
        assert all(re.fullmatch(r"[a-z0-9_]{8}", name) for name in names)
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in Path(place).glob("fused-mlp-*"))
        for server in servers:
            assert server.stop() == 0


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for temporary files, with a name short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="s", dir="/tmp") as name:
        yield Path(name)


def wait_until_ended(processes: set[int]) -> None:
    """Wait for processes whose parent has ended."""
    limit = time.monotonic() + START_LIMIT_S
    while left := [pid for pid in processes if is_alive(pid)]:
        assert time.monotonic() < limit, [title(pid) for pid in left]
        time.sleep(0.05)


def test_an_end_before_the_first_worker_has_loaded_leaves_nothing_behind(
    start: Start, tiny_model: Path, place: Path
) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", TMPDIR=str(place))
    server.wait_until(lambda: bool(list(place.rglob("listener-*"))))  # the manager's, which is there before a worker is
    assert server.stop() == 0
    assert list(place.iterdir()) == []
    assert "Traceback" not in server.output


def test_workers_that_load_while_the_server_is_killed_end_too_and_leave_nothing_behind(
    start: Start, tiny_model: Path, place: Path
) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", "--workers", "2", TMPDIR=str(place))
    server.wait_until(lambda: len(server.pids_of("worker")) == 2)
    processes = descendants(server.process.pid)
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_until_ended(processes)
    assert list(place.iterdir()) == []
    assert "Traceback" not in server.output


def test_what_a_killed_server_leaves_is_removed_by_its_children(start: Start, tiny_model: Path, place: Path) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", TMPDIR=str(place)).wait_ready()
    processes = descendants(server.process.pid)
    assert server.stop(signal.SIGKILL) == -signal.SIGKILL
    wait_until_ended(processes)
    assert list(place.iterdir()) == []
    assert not server.is_listening()


def test_the_end_of_the_manager_is_told_in_one_line_and_leaves_nothing_behind(
    start: Start, tiny_model: Path, place: Path
) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", TMPDIR=str(place)).wait_ready()
    processes = descendants(server.process.pid)
    os.kill(server.pid_of("helper"), signal.SIGKILL)
    assert server.wait_exit() == 1
    assert [pid for pid in processes if is_alive(pid)] == []
    assert list(place.iterdir()) == []
    assert "error: LitServe's manager ended unexpectedly; the server stops" in server.output
    assert "Traceback" not in server.output


def test_a_worker_that_ends_once_its_sockets_directory_was_cleaned_away_ends_the_server_with_the_reason(
    start: Start, tiny_model: Path, place: Path
) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", TMPDIR=str(place)).wait_ready()
    (directory,) = place.iterdir()
    shutil.rmtree(directory)
    assert server.post("/predict", json={"inputs": [0.5] * 8}).status_code == 200
    os.kill(server.pid_of("worker"), signal.SIGKILL)
    assert server.wait_exit() == 1
    told = f"error: worker 0 ended, with signal 9, and the directory of its socket is gone: {directory}; let nothing"
    assert told in server.output
    assert "Traceback" not in server.output


def test_a_resource_tracker_that_does_not_end_is_not_waited_for(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager").wait_ready()
    (tracker,) = (
        pid for pid in descendants(server.process.pid) if "resource_tracker" in Path(f"/proc/{pid}/cmdline").read_text()
    )
    os.kill(tracker, signal.SIGSTOP)
    assert server.stop() == 0
    assert not is_alive(tracker)


def test_the_end_of_the_terminal_is_ignored_where_whoever_starts_the_server_says_so(
    start: Start, tiny_model: Path
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does, for whatever is started now
    try:
        server = start("--model", str(tiny_model), "--backends", "eager").wait_ready()
    finally:
        signal.signal(signal.SIGHUP, before)
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines())
    assert int(status["SigIgn"], 16) & 1
    assert not int(status["SigBlk"], 16) & 1  # one that is blocked waits, ignored or not
    os.killpg(server.process.pid, signal.SIGHUP)
    server.wait_until(lambda: server.answers("/v2/health/ready", 200))
    assert server.stop() == 0
