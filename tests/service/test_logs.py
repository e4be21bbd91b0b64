import json
import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.running_server import ROOT, RunningServer, Start

pytestmark = pytest.mark.slow  # real servers

EAGER = ("--backends", "eager")
ROWS = {"inputs": [[0.5] * 8]}


def objects(server: RunningServer) -> list[dict[str, Any]]:
    """The log's lines, but those of a start."""
    told = [json.loads(line) for line in server.output.splitlines() if line.startswith("{")]
    return [each for each in told if each["logger"] != "service.start"]


def test_each_request_leaves_a_line_where_asked(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER, "--log-format", "json", "--log-requests").wait_ready()
    good, bad = {"inputs": [[0.5] * 8] * 3}, {"inputs": [[0.5] * 7]}
    for name, body in (("a", good), ("b", bad)):
        server.post("/predict", json=body, headers={"x-request-id": name})
    server.get("/backend")
    content = json.dumps(ROWS).encode()
    whole = b"content-length: %d\r\nx-request-id: c\r\n\r\n%b" % (len(content), content)
    chunked = b"transfer-encoding: chunked\r\nx-request-id: d\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(content), content)
    with server.stopped("worker"):
        for rest in (whole, chunked):
            seen = (server.accepted() + 1, server.metric("mlp_abandoned_total") + 1)
            with socket.create_connection(("127.0.0.1", server.port)) as leaving:
                leaving.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n" + rest)
                server.wait_until(lambda seen=seen: server.accepted() == seen[0])  # type: ignore[misc]
            server.wait_until(lambda seen=seen: server.metric("mlp_abandoned_total") == seen[1])  # type: ignore[misc]
    server.wait_until(lambda: len(objects(server)) == 4)
    first, second, *gone = objects(server)
    assert first | {"status": 200, "backend": "eager", "rows": 3, "batch_rows": 3, "request_id": "a"} == first
    assert {
        "time",
        "level",
        "logger",
        "message",
        "queue_us",
        "batch_us",
        "compute_us",
        "encode_us",
        "total_us",
    } <= first.keys()
    assert second | {"status": 400, "code": "bad_request", "request_id": "b"} == second
    assert [(line["request_id"], line["status"]) for line in gone] == [("c", "abandoned"), ("d", "abandoned")]
    assert all(line["total_us"] > 0 for line in gone)
    assert server.stop() == 0


def test_no_request_leaves_a_line_unless_asked(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    before = server.output
    assert server.post("/predict", json={"inputs": [[0.5] * 8]}).status_code == 200
    assert server.stop() == 0
    assert server.output == before


def test_what_goes_wrong_is_told_as_json_too_the_host_framework_s_complaints_included(
    start: Start, tiny_model: Path
) -> None:
    server = start("--model", str(tiny_model), *EAGER, "--log-format", "json").wait_ready()
    screen = set(server.output.splitlines())
    with server.stopped("worker") as worker:
        caller = threading.Thread(target=httpx.post, args=(server.url + "/predict",), kwargs={"json": ROWS})
        caller.start()
        server.wait_until(lambda: server.accepted() == 1)
        os.kill(worker, signal.SIGKILL)
        caller.join()
    server.wait_until(lambda: server.metric("mlp_worker_restarts_total") == 1)
    server.wait_until(lambda: server.answers("/v2/health/ready", 200))
    with server.stopped("worker"):
        assert server.stop() == 0
    later = [line for line in server.output.splitlines() if line not in screen]
    assert [line for line in later if not line.startswith("{")] == []
    told = objects(server)
    assert {each["level"] for each in told} <= {"WARNING", "ERROR"}
    assert [each["message"] for each in told if "1 requests in flight" in each["message"]] != []
    assert "litserve" in {each["logger"].partition(".")[0] for each in told}, server.output


class FailingWorkerServer(RunningServer):
    program = ("-m", "tests.service.failing_worker_server")


def test_a_fault_that_ends_a_worker_is_told_as_json_with_its_traceback(tmp_path: Path, tiny_model: Path) -> None:
    fail = tmp_path / "fail"
    fail.touch()
    flags = ("--model", str(tiny_model), *EAGER, "--log-format", "json")
    server = FailingWorkerServer(tmp_path / "log", *flags, FAIL=str(fail))
    try:
        screen = set(server.wait_ready().output.splitlines())
        fail.unlink()
        lost = server.post("/predict", json=ROWS)
        assert (lost.status_code, lost.json()["code"]) == (503, "worker_lost")
        server.wait_until(lambda: server.metric("mlp_worker_restarts_total") == 1)
        assert server.stop() == 0
    finally:
        server.end()
    assert [each for each in server.output.splitlines() if each not in screen and not each.startswith("{")] == []
    fault = next(each for each in objects(server) if "fault of the server" in each["message"])
    assert "LookupError: planted" in fault["exc_info"]


def stderr_of(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and stderr, every line an object, of a server that cannot start."""
    command = [sys.executable, "-m", "service", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, [json.loads(line) for line in done.stderr.splitlines()]


def test_a_start_that_fails_says_so_as_json_where_that_is_asked_for() -> None:
    status, told = stderr_of("--model", "nowhere", "--log-format", "json")
    assert (status, [each["level"] for each in told]) == (2, ["ERROR"])
    assert "nowhere" in told[0]["message"]


def test_a_worker_that_ends_is_told_with_its_pid_and_all_of_stderr_is_json_with_times_in_utc(
    start: Start, tiny_model: Path
) -> None:
    server = start("--model", str(tiny_model), *EAGER, "--log-format", "json").wait_ready()
    worker = server.pid_of("worker")
    os.kill(worker, signal.SIGKILL)
    server.wait_until(lambda: server.metric("mlp_worker_restarts_total") == 1)
    server.wait_until(lambda: server.answers("/v2/health/ready", 200))
    assert server.stop() == 0
    (ended,) = objects(server)
    assert ended["message"] == f"worker 0, pid {worker}, ended with signal 9; it is started anew"
    assert (ended["level"], ended["logger"]) == ("ERROR", "service.host")
    lines = server.output.splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    starting, *_ = [each["message"] for each in told]
    assert starting == f"starting  tiny from {tiny_model}"
    assert "warming up ..." in {each["message"] for each in told}
    assert [each for each in told if not each["message"]] == []
    assert {datetime.fromisoformat(each["time"]).utcoffset() for each in told} == {timedelta(0)}
    screen = [line for line in lines if line and not line.startswith("{")]
    assert {line.split()[0] for line in screen} == {"model", "device", "backend", "default", "ready", "try"}
