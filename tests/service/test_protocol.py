"""The two doors of inference, and the time that a connection is given, over a real port."""

import gzip
import json
import socket
import threading
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.running_server import RunningServer, Start

pytestmark = pytest.mark.slow  # real servers

GOOD = [[float(value % 17) for value in range(64)]]
BODY = json.dumps({"inputs": GOOD}).encode()
EAGER = ("--backends", "eager")


def talk(port: int, sent: bytes) -> bytes:
    """Send bytes over a connection of their own and return all that comes until the server closes it."""
    reply = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(sent)
        while data := connection.recv(65536):
            reply += data
    return reply


def request(
    target: str = "/predict", body: bytes = BODY, *headers: str, version: str = "1.1", is_chunked: bool = False
) -> bytes:
    length = "transfer-encoding: chunked" if is_chunked else f"content-length: {len(body)}"
    lines = [f"POST {target} HTTP/{version}", "host: x", "content-type: application/json", length, *headers]
    sent = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + sent


def parsed(reply: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = reply.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


CLOSE = "connection: close"
DOORS = {
    "usual": {},
    "chunked": {"is_chunked": True},
    "query": {"target": "/predict?x=1"},
    "escaped": {"target": "/%70redict"},
    "old": {"version": "1.0"},
    "expecting": {"headers": ("expect: 100-continue",)},
}


def through(port: int, door: dict[str, Any], body: bytes = BODY, *headers: str) -> tuple[int, dict[str, Any]]:
    door = dict(door)
    headers = (*door.pop("headers", ()), *headers, CLOSE)
    return parsed(talk(port, request(door.pop("target", "/predict"), body, *headers, **door)))


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_every_way_to_ask_is_answered_alike(server: RunningServer, client: httpx.Client, door: dict[str, Any]) -> None:
    status, reply = through(server.port, door)
    usual = client.post("/predict", json={"inputs": GOOD}).json()
    assert status == 200
    assert reply["outputs"][0] == pytest.approx(usual["outputs"][0], abs=1e-4)
    assert [*reply] == [*usual]


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("body", "headers", "expected"),
    [
        (b"{", (), (400, "bad_request")),
        (json.dumps({"inputs": GOOD * 2000}).encode(), (), (413, "too_large")),
        (BODY, ("content-encoding: br",), (415, "unsupported_media_type")),
        (gzip.compress(bytes(50 << 20)), ("content-encoding: gzip",), (413, "too_large")),
        (json.dumps({"inputs": GOOD, "backend": "turbo"}).encode(), (), (400, "bad_request")),
        (json.dumps({"inputs": GOOD, "timeout_ms": 1e-6}).encode(), (), (504, "deadline_exceeded")),
    ],
    ids=["malformed", "rows", "encoding", "bomb", "backend", "deadline"],
)
def test_every_way_to_ask_is_refused_alike(
    server: RunningServer, door: dict[str, Any], body: bytes, headers: tuple[str, ...], expected: tuple[int, str]
) -> None:
    status, reply = through(server.port, door, body, *headers)
    assert (status, reply["code"], sorted(reply)) == (*expected, ["code", "error"])


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize(
    ("encoding", "packed"), [("gzip", gzip.compress(BODY)), ("deflate", zlib.compress(BODY))], ids=["gzip", "deflate"]
)
def test_a_packed_body_is_unpacked(server: RunningServer, door: dict[str, Any], encoding: str, packed: bytes) -> None:
    status, reply = through(server.port, door, packed, f"content-encoding: {encoding}")
    assert (status, len(reply["outputs"])) == (200, 1)


def test_requests_sent_ahead_are_answered_in_their_order(server: RunningServer) -> None:
    bodies = [json.dumps({"inputs": GOOD, "id": str(index)}).encode() for index in range(20)]
    ahead = [request("/predict", body, is_chunked=index % 3 == 2) for index, body in enumerate(bodies[:-1])]
    replies = talk(server.port, b"".join(ahead) + request("/predict", bodies[-1], CLOSE))
    assert [part.split(b'"')[0] for part in replies.split(b'"id":"')[1:]] == [b"%d" % index for index in range(20)]


def test_a_body_that_comes_in_pieces_is_one_request(server: RunningServer) -> None:
    sent = request("/predict", BODY, CLOSE)
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), 7):
            connection.sendall(sent[at : at + 7])
        reply = b""
        while data := connection.recv(65536):
            reply += data
    assert parsed(reply)[0] == 200


def test_a_connection_without_requests_is_closed_in_time(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER, "--keep-alive-s", "0.3").wait_ready()
    body = json.dumps({"inputs": [0.5] * 8}).encode()
    assert talk(server.port, b"") == b""
    assert talk(server.port, request("/predict", body)).startswith(b"HTTP/1.1 200")
    assert talk(server.port, b"GET /backend HTTP/1.1\r\nhost: x\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert server.stop() == 0


@pytest.mark.parametrize(
    "sent", [request()[:20], request()[:-5], request(is_chunked=True)[:-5]], ids=["head", "body", "chunk"]
)
def test_a_request_that_does_not_arrive_whole_is_given_up(start: Start, tiny_model: Path, sent: bytes) -> None:
    server = start("--model", str(tiny_model), *EAGER, "--receive-timeout-s", "0.3").wait_ready()
    status, reply = parsed(talk(server.port, sent))
    assert (status, reply["code"]) == (400, "bad_request")
    assert "not whole after" in reply["error"]
    assert server.stop() == 0


def test_a_slow_answer_is_no_idle_connection(start: Start, slow_model: Path) -> None:
    limits = ("--keep-alive-s", "0.05", "--receive-timeout-s", "0.05")
    server = start("--model", str(slow_model), *EAGER, "--threads", "1", *limits).wait_ready()
    body = json.dumps({"inputs": [[0.5] * 8] * 1024}).encode()
    for is_chunked in (False, True):
        assert talk(server.port, request("/predict", body, is_chunked=is_chunked)).startswith(b"HTTP/1.1 200")
    assert server.stop() == 0


@pytest.mark.parametrize("is_chunked", [False, True], ids=["usual", "chunked"])
def test_what_nobody_waits_for_any_more_is_not_computed(start: Start, slow_model: Path, is_chunked: bool) -> None:
    server = start("--model", str(slow_model), *EAGER, "--threads", "1").wait_ready()
    long = json.dumps({"inputs": [[0.5] * 8] * 1024}).encode()
    short = json.dumps({"inputs": [[0.5] * 8] * 3}).encode()
    replies: list[bytes] = []
    first = threading.Thread(target=lambda: replies.append(talk(server.port, request("/predict", long, CLOSE))))
    first.start()
    server.wait_until(lambda: server.accepted() == 1)
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(request("/predict", short, is_chunked=is_chunked))
        server.wait_until(lambda: server.accepted() == 2)
    server.wait_until(lambda: server.metric("mlp_abandoned_total") == 1)
    status, reply = parsed(talk(server.port, request("/predict", short, CLOSE)))
    first.join()
    assert (status, reply["timing"]["batch_rows"]) == (200, 3)
    assert replies[0].startswith(b"HTTP/1.1 200")
    assert server.stop() == 0
