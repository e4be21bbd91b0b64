import socketserver
import threading
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
            for piece in pieces:
                self.request.sendall(piece)


@pytest.fixture
def server() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Scripted) as server:
        threading.Thread(target=server.serve_forever).start()
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
    ],
    ids=["status", "body", "head"],
)
def test_anything_but_a_whole_200_is_an_error(
    server: socketserver.ThreadingTCPServer, reply: list[bytes], message: str
) -> None:
    with connect(server, reply) as connection, pytest.raises(UnexpectedReplyError, match=message):
        connection.time_ns(post("/", b"BODY"))
