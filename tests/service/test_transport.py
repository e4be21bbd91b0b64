"""What a request's head decides, and the end of a connection while its request is still coming, over a real port."""

import contextlib
import json
import re
import socket
import time
from pathlib import Path

import pytest

from tests.service.running_server import RunningServer, Start, talk
from tests.service.test_protocol import BODY, CLOSE, EAGER, parsed, request

pytestmark = pytest.mark.slow  # real servers

REFUSED_BY_HEAD = {
    "key": (401, ("x-api-key: wrong",)),
    "type": (415, ("x-api-key: right", "content-type: text/plain")),
    "encoding": (415, ("x-api-key: right", "content-encoding: br")),
}


def head_of(target: str, length: str, *headers: str) -> bytes:
    return "\r\n".join([f"POST {target} HTTP/1.1", "host: x", length, *headers]).encode() + b"\r\n\r\n"


def next_reply(connection: socket.socket) -> bytes:
    """One reply, whole, and nothing behind it."""
    reply = b""
    while b"\r\n\r\n" not in reply:
        data = connection.recv(65536)
        assert data, reply
        reply += data
    head, _, body = reply.partition(b"\r\n\r\n")
    length = int(head.split(b"content-length: ")[1].split()[0])
    while len(body) < length:
        body += connection.recv(65536)
    assert len(body) == length
    return head + b"\r\n\r\n" + body


@pytest.mark.parametrize("target", ["/predict", "/predict?x=1", "/compare"])
@pytest.mark.parametrize(("status", "headers"), REFUSED_BY_HEAD.values(), ids=REFUSED_BY_HEAD)
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_a_request_that_its_head_refuses_is_refused_before_its_body_comes_and_the_next_one_is_read(
    lend: Start, target: str, status: int, headers: tuple[str, ...], is_chunked: bool
) -> None:
    server = lend(MLP_API_KEY="right")
    before = server.metric("mlp_requests_total", status=str(status))
    length = "transfer-encoding: chunked" if is_chunked else "content-length: 100000"
    body = b"186a0\r\n%b\r\n0\r\n\r\n" % bytes(100_000) if is_chunked else bytes(100_000)
    good = json.dumps({"inputs": [0.5] * 8}).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        for count in (1, 2):
            connection.sendall(head_of(target, length, *headers))
            reply = next_reply(connection)
            assert parsed(reply)[0] == status
            assert b"connection: close" not in reply
            connection.sendall(body)
            connection.sendall(request("/predict", good, "x-api-key: right"))
            assert parsed(next_reply(connection))[0] == 200
            if target != "/compare" or status != 401:
                assert server.metric("mlp_requests_total", status=str(status)) == before + count


@pytest.mark.parametrize("target", ["/predict", "/predict?x=1", "/compare"])
@pytest.mark.parametrize(("status", "headers"), REFUSED_BY_HEAD.values(), ids=REFUSED_BY_HEAD)
@pytest.mark.parametrize("last", [CLOSE, "expect: 100-continue"])
def test_a_refusal_that_ends_the_connection_comes_at_once_and_no_reset_takes_it_from_who_sends_on(
    lend: Start, target: str, status: int, headers: tuple[str, ...], last: str
) -> None:
    server = lend(MLP_API_KEY="right")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head_of(target, "content-length: 100000", last, *headers))
        reply = next_reply(connection)
        assert (parsed(reply)[0], reply.count(b"connection: close")) == (status, 1)
        assert b" 100 " not in reply
        for _ in range(10):
            connection.sendall(bytes(10_000))
            time.sleep(0.01)  # for a reset to arrive, if there is one
        assert connection.recv(65536) == b""


def test_a_body_that_is_too_large_is_refused_before_it_comes(server: RunningServer) -> None:
    for target in ("/predict", "/predict?x=1", "/compare"):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(head_of(target, "content-length: 100000000"))
            assert parsed(next_reply(connection))[0] == 413
            for _ in range(100):
                connection.sendall(bytes(1_000_000))
            assert connection.recv(65536) == b""


def test_a_refused_request_whose_body_never_comes_does_not_keep_the_server_from_its_end(
    start: Start, tiny_model: Path
) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head_of("/predict", "content-length: 100", "content-type: text/plain"))
        assert parsed(next_reply(connection))[0] == 415
        assert server.stop() == 0
        assert connection.recv(65536) == b""
    assert "Traceback" not in server.output


@pytest.mark.parametrize("target", ["/nope", "/predict"])
def test_a_body_that_was_announced_and_not_wanted_ends_the_connection(server: RunningServer, target: str) -> None:
    head = f"POST {target} HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n"
    reply = talk(server.port, head.encode() + b"expect: 100-continue\r\ncontent-length: 45\r\n\r\n")
    assert parsed(reply)[0] in (404, 415)
    assert b"connection: close" in reply


def statuses(replies: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", replies)]


def rest_of(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    replies = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            replies += data
    return replies


LIVE = b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
ANSWERED = {
    "200": (200, "GET /health"),
    "404": (404, "POST /nope"),
    "405": (405, "PUT /predict"),
    "415": (415, "POST /predict"),
}


@pytest.mark.parametrize(("status", "target"), ANSWERED.values(), ids=ANSWERED)
def test_a_body_beyond_the_bound_has_one_reply_which_ends_the_connection(
    server: RunningServer, status: int, target: str
) -> None:
    size = 3 << 20
    head = f"{target} HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ncontent-length: {size}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode())
        reply = next_reply(connection)
        assert (statuses(reply), b"connection: close" in reply) == ([status], True)
        connection.sendall(bytes(size))
        assert rest_of(connection) == b""


@pytest.mark.parametrize(("status", "target"), ANSWERED.values(), ids=ANSWERED)
@pytest.mark.parametrize(
    "rest", [b"zzz\r\n", b"%x\r\n%b\r\n" % (3 << 20, bytes(3 << 20))], ids=["broken", "beyond the bound"]
)
def test_the_rest_of_an_answered_request_has_no_reply_of_its_own(
    server: RunningServer, status: int, target: str, rest: bytes
) -> None:
    head = f"{target} HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode())
        assert statuses(next_reply(connection)) == [status]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(rest + LIVE)
        assert rest_of(connection) == b""
    assert server.get("/v2/health/live").status_code == 200


@pytest.mark.parametrize("last", [b"0\r\n\r\n", b"0\r\nx-checksum: 1\r\n\r\n"], ids=["plain", "trailer"])
def test_the_rest_of_an_answered_body_is_dropped_however_it_is_cut(server: RunningServer, last: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head_of("/predict", "transfer-encoding: chunked", "content-type: text/plain"))
        assert statuses(next_reply(connection)) == [415]
        for part in (b"1d4c0\r\n%b\r\n" % bytes(120_000), b"5\r\n", b"hello\r\n", last, LIVE):
            connection.sendall(part)
            time.sleep(0.02)  # so that each mostly comes by itself; the reply is the same if it does not
        assert statuses(rest_of(connection)) == [200]


def test_what_stands_between_the_chunks_of_a_body_is_bounded_for_each_alone(server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head_of("/predict", "transfer-encoding: chunked", CLOSE, "content-type: application/json"))
        for value in b" " * 5:
            for part in (b"1;x=%b" % (b"y" * 30_000), b"\r\n%c\r\n" % value):
                connection.sendall(part)
                time.sleep(0.02)  # so that each mostly comes by itself; the reply is the same if it does not
        connection.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert statuses(rest_of(connection)) == [200]


def test_who_is_beyond_the_bound_of_connections_gets_the_refusal_and_no_reset(lend: Start) -> None:
    server = lend("--max-connections", "1")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as within:
        within.sendall(request("/predict", json.dumps({"inputs": [0.5] * 8}).encode()))
        assert statuses(next_reply(within)) == [200]
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as beyond:
            beyond.sendall(head_of("/predict", "content-length: 100000"))
            assert statuses(next_reply(beyond)) == [429]
            for _ in range(10):
                beyond.sendall(bytes(10_000))
                time.sleep(0.01)  # for a reset to arrive, if there is one
            assert beyond.recv(65536) == b""


@pytest.mark.parametrize("target", ["/predict", "/predict?x=1"])
def test_a_request_of_inference_that_leaves_its_host_open_is_counted(server: RunningServer, target: str) -> None:
    before = server.metric("mlp_rejected_total", code="bad_request")
    reply = talk(server.port, request(target).replace(b"host: x\r\n", b""))
    assert statuses(reply) == [400]
    assert server.metric("mlp_rejected_total", code="bad_request") == before + 1


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\n\r\n", b"no request\r\n\r\n", LIVE], ids=["no host", "no request", "usual"]
)
def test_every_reply_has_its_date(server: RunningServer, sent: bytes) -> None:
    assert len(re.findall(rb"\r\ndate: [^\r]+ GMT\r\n", talk(server.port, sent))) == 1


UNFINISHED = {
    "usual": head_of("/predict", "content-length: 500"),
    "chunked": head_of("/predict", "transfer-encoding: chunked") + b"5\r\nhello\r\n",
    "query": head_of("/predict?x=1", "content-length: 500") + b"hello",
    "old": head_of("/predict", "content-length: 500").replace(b"HTTP/1.1", b"HTTP/1.0"),
    "expecting": head_of("/predict", "content-length: 500", "expect: 100-continue"),
    "compare": head_of("/compare", "content-length: 500"),
    "backend": head_of("/backend", "content-length: 500").replace(b"POST", b"PUT"),
}


def test_a_request_that_is_half_sent_at_the_end_is_told_that_the_server_is_stopping(
    start: Start, tiny_model: Path
) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    with contextlib.ExitStack() as stack:
        connections = {
            name: stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            for name in UNFINISHED
        }
        for name, connection in connections.items():
            connection.sendall(UNFINISHED[name])
        expecting = connections["expecting"].recv(65536)
        assert statuses(expecting) == [100]
        assert statuses(talk(server.port, LIVE)) == [200]  # so all before it have been read
        assert server.stop() == 0
        for name, connection in connections.items():
            reply = rest_of(connection)
            assert (name, statuses(reply)) == (name, [503])
            assert b'"code":"draining"' in reply
    assert "Traceback" not in server.output
