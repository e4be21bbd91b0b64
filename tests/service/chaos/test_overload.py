"""More than fits, which is refused while it lasts and leaves nothing behind; and large replies beside small ones."""

import contextlib
import json
import socket
import threading
from pathlib import Path

import httpx
import pytest

from tests.service.running_server import RunningServer, Start, resident_kib

pytestmark = pytest.mark.slow  # real servers

EAGER = ("--backends", "eager")
BOUND = 24
LARGE = 16  # replies of a few megabytes


def test_what_exceeds_the_queue_is_refused_while_it_is_full_and_the_rest_answered(
    start: Start, tiny_model: Path
) -> None:
    bounds = ("--max-batch-rows", "8", "--max-queue-rows", str(BOUND))
    server = start("--model", str(tiny_model), *EAGER, *bounds).wait_ready()
    body = {"inputs": [[0.5] * 8] * 3}
    accepted: list[httpx.Response] = []

    def ask() -> None:
        accepted.append(httpx.post(server.url + "/predict", json=body, timeout=60))

    with server.stopped("worker"), httpx.Client(base_url=server.url, timeout=60) as beyond:
        threads = [threading.Thread(target=ask) for _ in range(BOUND // 3)]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.metric("mlp_queue_rows") == BOUND)
        assert server.metric("mlp_queue_counted_rows") == server.metric("mlp_queue_limit_rows") == BOUND
        held = resident_kib(server.pid_of("http"))
        for _ in range(1500):  # many times what fits; each is answered while nothing can be computed
            refused = beyond.post("/predict", json=body)
            assert (refused.status_code, refused.json()["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"] == "1"
        assert accepted == []
        assert server.get("/v2/health/ready").status_code == 200
        assert resident_kib(server.pid_of("http")) < held + (8 << 10)
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in accepted] == [200] * (BOUND // 3)
    assert server.post("/predict", json=body).status_code == 200
    assert server.metric("mlp_rejected_total", code="overloaded") == 1500
    assert server.metric("mlp_queue_rows") == 0
    assert server.stop() == 0


def test_under_several_times_capacity_every_request_is_answered_or_refused_and_counted(
    start: Start, tiny_model: Path
) -> None:
    several = ("--workers", "2", "--api-servers", "2", "--max-batch-rows", "4", "--max-queue-rows", "16")
    server = start("--model", str(tiny_model), *EAGER, *several).wait_ready()
    assert (server.metric("mlp_queue_limit_rows"), server.metric("mlp_queue_counted_rows")) == (16, 0)
    statuses: list[int] = []

    def load() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            replies = [client.post("/predict", json={"inputs": [[0.5] * 8] * 4}) for _ in range(60)]
            statuses.extend(reply.status_code for reply in replies)

    threads = [threading.Thread(target=load) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(statuses) == 16 * 60
    assert set(statuses) == {200, 429}
    for status in (200, 429):
        assert server.metric("mlp_requests_total", status=str(status)) == statuses.count(status)
    assert (server.metric("mlp_queue_rows"), server.metric("mlp_inflight_requests")) == (0, 0)
    assert server.post("/predict", json={"inputs": [[0.5] * 8] * 4}).status_code == 200
    assert server.stop() == 0


def test_large_json_replies_do_not_keep_small_requests_waiting_behind_all_of_them(
    start: Start, tiny_model: Path
) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps(config | {"dim": 4096, "hidden": 8}))
    body = json.dumps({"inputs": [[0] * 4096] * 64}).encode()
    ask = b"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    for _ in range(5):  # on a busy host all may be made between two looks, but hardly each time
        server = start("--model", str(tiny_model), *EAGER).wait_ready()  # one that has not learnt to refuse any
        unanswered = unanswered_while_made(server, ask)
        assert server.stop() == 0
        if set(unanswered) - {0, LARGE}:
            return
    pytest.fail("expected small requests to be answered between large ones, got them answered before or after all")


def unanswered_while_made(server: RunningServer, ask: bytes) -> list[float]:
    """How many large requests are unanswered each time that a small one is answered beside them."""
    with contextlib.ExitStack() as opened, server.stopped("worker"):
        for _ in range(LARGE):
            connection = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            connection.sendall(ask)
        server.wait_until(lambda: server.metric("mlp_inflight_requests") == LARGE)
        kept = opened.pop_all()
    with kept:  # nobody reads the large replies: what is seen is when they were made
        unanswered = [float(LARGE)]
        while unanswered[-1]:
            unanswered.append(server.metric("mlp_inflight_requests"))
    return unanswered
