"""`POST /profile` on real servers. That batches go first, a pass at a time, is held by test_worker.py."""

import os
import re
import resource
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.kernel_profiles import MAX_TRACES
from tests.service.running_server import Start

pytestmark = pytest.mark.slow  # real servers


@pytest.mark.parametrize("backend", ["eager", "compiled", "fused"])
def test_a_profile_tells_what_a_pass_is_made_of_and_leaves_a_trace(client: httpx.Client, backend: str) -> None:
    reply = client.post("/profile", json={"rows": 8, "backend": backend}).json()
    implementation = client.get("/backend").json()["backends"][backend]["implementation"]
    assert (reply["backend"], reply["implementation"], reply["rows"]) == (backend, implementation, 8)
    operators = [line for line in reply["lines"] if line["level"] == "operator"]
    assert sum(line["count"] for line in operators) == reply["operators"] > 0
    assert all(line["time_us"] > 0 and line["name"] for line in operators)
    assert re.fullmatch(r"/profile/[0-9a-f]{32}\.json", reply["trace"])
    trace = client.get(reply["trace"])
    assert trace.headers["content-disposition"].startswith("attachment")
    events = trace.json()["traceEvents"]
    assert {line["name"] for line in operators} <= {event.get("name") for event in events}
    assert not {"traceName", "host_name"} & trace.json().keys()  # where it lay, and on whose disk
    assert "/traces/" not in trace.text


def test_the_default_backend_and_64_rows_are_profiled_where_nothing_is_named(client: httpx.Client) -> None:
    reply = client.post("/profile", json={}).json()
    assert (reply["rows"], reply["backend"]) == (64, client.get("/backend").json()["default"])


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"rows": 0}, 400, "rows: expected greater than or equal to 1, got 0"),
        ({"rows": 513}, 413, "rows: expected at most 512, as many as a batch may have, got 513"),
        ({"backend": "turbo"}, 400, "expected one of eager, compiled, fused, got 'turbo'"),
        ({"inputs": [[1.0] * 64]}, 400, "'inputs': no such field"),
    ],
    ids=str,
)
def test_a_profile_that_cannot_be_is_refused(
    client: httpx.Client, body: dict[str, Any], status: int, message: str
) -> None:
    reply = client.post("/profile", json=body)
    assert reply.status_code == status
    assert message in reply.json()["error"]
    assert client.post("/profile", json={"rows": 1}).status_code == 200


@pytest.mark.parametrize("name", ["0" * 32, "..%2f..%2fetc%2fpasswd", "x", "%00"])
def test_a_trace_that_is_not_there_is_not_found(client: httpx.Client, name: str) -> None:
    reply = client.get(f"/profile/{name}.json")
    assert (reply.status_code, reply.json()["code"]) == (404, "not_found")


def test_one_profile_runs_at_a_time_and_traces_are_few_whichever_process_answers(
    start: Start, tiny_model: Path
) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", "--api-servers", "2").wait_ready()

    def ask() -> httpx.Response:
        return httpx.post(server.url + "/profile", json={"rows": 4}, timeout=60)

    refused: list[httpx.Response] = []

    def is_refused() -> bool:
        """Once the worker, which is stopped, owes one process a profile."""
        if server.metric("mlp_inflight_profiles"):
            refused.extend(ask() for _ in range(8))  # a connection each, so that both processes answer some
        return bool(refused)

    (first,) = server.answers_together([ask], until=is_refused)
    assert first.status_code == 200
    for reply in refused:
        assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (429, "overloaded", "1")
    traces = [ask().json()["trace"] for _ in range(MAX_TRACES + 2)]
    statuses = [[server.get(trace).status_code for trace in traces] for _ in range(4)]
    assert statuses == [[404] * 2 + [200] * MAX_TRACES] * 4
    assert server.stop() == 0


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory for servers' temporary files; that of a test is too long for the path of a socket."""
    with tempfile.TemporaryDirectory() as place:
        yield Path(place)


def test_a_profile_whose_trace_cannot_be_written_is_answered_without_and_leaves_nothing(
    place: Path, lend: Start
) -> None:
    server = lend(TMPDIR=str(place))
    (traces,) = place.glob("fused-mlp-*/traces")
    worker, usual = server.pid_of("worker"), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.prlimit(worker, resource.RLIMIT_FSIZE, (4096, usual[1]))  # which fails writes as a full disk does
    for _ in range(2):
        reply = server.post("/profile", json={"rows": 4})
        assert (reply.status_code, reply.json()["trace"]) == (200, None)
        assert list(traces.iterdir()) == []
    resource.prlimit(worker, resource.RLIMIT_FSIZE, usual)
    assert server.get(server.post("/profile", json={"rows": 4}).json()["trace"]).status_code == 200
    assert server.output.count("the trace of a profile could not be written") == 2
    assert "Traceback" not in server.output


def test_what_profiles_left_is_removed_too_where_the_next_ones_caller_leaves(place: Path, lend: Start) -> None:
    server = lend(TMPDIR=str(place))
    (traces,) = place.glob("fused-mlp-*/traces")
    for number in range(2 * MAX_TRACES):
        (traces / f"{number:032x}.json.tmp").touch()
    with server.stopped("worker"):
        with socket.create_connection(("127.0.0.1", server.port)) as leaving:
            leaving.sendall(b"POST /profile HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
            server.wait_until(lambda: server.metric("mlp_inflight_profiles") == 1)
        server.wait_until(lambda: len(list(traces.iterdir())) <= MAX_TRACES)


def test_profiles_are_answered_where_the_directory_of_their_traces_was_cleaned_away(place: Path, lend: Start) -> None:
    server = lend(TMPDIR=str(place))
    (traces,) = place.glob("fused-mlp-*/traces")
    shutil.rmtree(traces)
    assert server.post("/profile", json={"backend": "turbo"}).status_code == 400
    shutil.rmtree(traces)
    assert server.get(server.post("/profile", json={"rows": 4}).json()["trace"]).status_code == 200


def test_a_profile_needs_the_key_and_ends_with_its_worker(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", "--api-key", "secret").wait_ready()
    assert server.post("/profile", json={}).status_code == 401
    assert server.get(f"/profile/{'0' * 32}.json").status_code == 401
    with httpx.Client(base_url=server.url, headers={"x-api-key": "secret"}, timeout=60) as client:

        def in_flight() -> bool:
            return "\nmlp_inflight_profiles 1.0" in client.get("/metrics").text

        replies: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: replies.append(client.post("/profile", json={})))
        with server.stopped("worker") as pid:
            asking.start()
            server.wait_until(in_flight)
            os.kill(pid, signal.SIGKILL)
            asking.join()
        assert (replies[0].status_code, replies[0].json()["code"]) == (503, "worker_lost")
        server.wait_until(lambda: client.get("/v2/health/ready").status_code == 200)
        assert client.post("/profile", json={}).status_code == 200
