import contextlib
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from loadtests.connection import Connection, UnexpectedReplyError, post


class Scripted(socketserver.BaseRequestHandler):
    """Answers each request with the next of the server's replies, in the pieces it is given in."""

    def handle(self) -> None:
        for pieces in self.server.replies:  # type: ignore[attr-defined]
            received = b""
            while not received.endswith(b"BODY"):
                data = self.request.recv(4096)
                if not data:
                    return
                received += data
            with contextlib.suppress(OSError):  # the client has seen enough
                for piece in pieces:
                    self.request.sendall(piece)


@pytest.fixture
def server() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Scripted) as server:
        server.daemon_threads = True  # a test that fails leaves a connection open
        threading.Thread(target=server.serve_forever, args=(0.02,)).start()
        yield server
        server.shutdown()


def connect(server: socketserver.ThreadingTCPServer, *replies: list[bytes]) -> Connection:
    server.replies = replies  # type: ignore[attr-defined]
    return Connection("127.0.0.1", server.server_address[1])


def test_a_request_states_its_length_and_type() -> None:
    request = post("/predict", b"12345")
    assert request.startswith(b"POST /predict HTTP/1.1\r\n")
    assert b"\r\ncontent-length: 5\r\n\r\n12345" in request
    assert b"\r\ncontent-type: application/json\r\n" in request


def test_a_reply_may_come_in_any_pieces_and_the_next_one_is_not_eaten(server: socketserver.ThreadingTCPServer) -> None:
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcd"
    with connect(server, [whole[:7], whole[7:30], whole[30:]], [whole]) as connection:
        assert connection.time_ns(post("/", b"BODY")) > 0
        assert connection.time_ns(post("/", b"BODY")) > 0


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ([b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"], "expected status 200"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc"], "closed the connection in mid-reply"),
        ([b""], "closed the connection"),
        ([b"garbage\r\n\r\n"], "expected an HTTP reply with its content-length, got b'garbage"),
        ([b"HTTP/1.1 abc\r\ncontent-length: 0\r\n\r\n"], "expected an HTTP reply"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n"], "expected an HTTP reply with its content-length"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nabc"], "a body of 1 bytes, as its head says, got more"),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\nabc" % 10**15], "and at most"),
        ([b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 20_000], "bytes without the end of a head"),
    ],
    ids=["status", "body", "head", "garbage", "no status", "no length", "too long", "huge", "endless head"],
)
def test_anything_but_a_whole_200_is_an_error(
    server: socketserver.ThreadingTCPServer, reply: list[bytes], message: str
) -> None:
    with connect(server, reply) as connection, pytest.raises(UnexpectedReplyError, match=message):
        connection.time_ns(post("/", b"BODY"))


def test_a_connection_that_the_server_closed_takes_no_further_request(server: socketserver.ThreadingTCPServer) -> None:
    def ask_until_it_is_seen(connection: Connection) -> None:
        for _ in range(1000):
            connection.require_open()
            time.sleep(0.01)

    with connect(server) as connection, pytest.raises(UnexpectedReplyError, match="closed the connection between two"):
        ask_until_it_is_seen(connection)


def test_a_reply_that_comes_in_drops_has_to_be_whole_in_time(server: socketserver.ThreadingTCPServer) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 400\r\n\r\n"

    def drops() -> Iterator[bytes]:
        yield head
        for _ in range(400):
            time.sleep(0.02)
            yield b"x"

    server.replies = [drops()]  # type: ignore[attr-defined]
    with (
        Connection("127.0.0.1", server.server_address[1], timeout_s=0.3) as connection,
        pytest.raises(TimeoutError, match=r"no whole reply within 0\.3 s"),
    ):
        connection.exchange(post("/", b"BODY"))
