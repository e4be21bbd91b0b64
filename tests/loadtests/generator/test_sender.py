import json
import select
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from loadtests.generator.sender import Sender
from loadtests.generator.target import Payload, Target, payloads
from tests.service.running_server import free_port

STAGES = b"x-queue-us: 100\r\nx-batch-us: 20\r\nx-compute-us: 3000\r\nx-encode-us: 40\r\nx-batch-rows: 7\r\n"
OK = b"HTTP/1.1 200 OK\r\nX-Backend: fused\r\n" + STAGES
BODY = json.dumps({"outputs": [[0.5]]}).encode()


Reply = bytes | None | tuple[bytes, bytes | None]


class Scripted(socketserver.StreamRequestHandler):
    """Answers each request with the next of the server's replies, None by closing; counts connections.

    Of two it sends the first, and the second once the test has set `has_been_read`.
    """

    def handle(self) -> None:
        self.server.connections += 1  # type: ignore[attr-defined]
        while True:
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name == b"content-length" else length
            if not line:
                return
            self.rfile.read(length)
            reply = self.server.replies.pop(0)  # type: ignore[attr-defined]
            for piece in reply if isinstance(reply, tuple) else (reply,):
                if isinstance(reply, tuple) and piece is reply[1]:
                    assert self.server.has_been_read.wait(30)  # type: ignore[attr-defined]
                if piece is None:
                    return
                self.wfile.write(piece)


@pytest.fixture
def server() -> Iterator[socketserver.ThreadingTCPServer]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Scripted) as server:
        server.daemon_threads = True  # a test that fails leaves a connection open
        server.connections = 0  # type: ignore[attr-defined]
        server.has_been_read = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def whole(head: bytes, body: bytes = BODY) -> bytes:
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


def set_up(server: socketserver.ThreadingTCPServer, *replies: Reply) -> tuple[Sender, Payload]:
    server.replies = list(replies)  # type: ignore[attr-defined]
    target = Target("127.0.0.1", server.server_address[1], "m", "json", 2, 1, seed=0)
    return Sender(target), payloads(target, "fused", 1)[0]


def test_latency_counts_from_when_the_request_was_due(server: socketserver.ThreadingTCPServer) -> None:
    sender, payload = set_up(server, whole(OK), whole(OK))
    late = sender.send(payload, due_s=time.perf_counter() - 0.25)
    assert late.code is None
    assert late.late_ms >= 250
    assert late.latency_ms > late.late_ms
    assert sender.send(payload).late_ms == 0
    sender.close()


def test_the_server_s_stages_are_read_and_its_connection_kept(server: socketserver.ThreadingTCPServer) -> None:
    sender, payload = set_up(server, whole(OK), whole(OK))
    outcome = sender.send(payload)
    assert outcome.stages_ms == (0.1, 0.02, 3.0, 0.04)
    assert outcome.batch_rows == "7"
    sender.send(payload)
    sender.close()
    assert server.connections == 1  # type: ignore[attr-defined]


def test_a_connection_that_the_server_closes_is_not_used_again(server: socketserver.ThreadingTCPServer) -> None:
    sender, payload = set_up(server, whole(OK + b"Connection:Close\r\n"), whole(OK))
    assert [sender.send(payload).code for _ in range(2)] == [None, None]
    sender.close()
    assert server.connections == 2  # type: ignore[attr-defined]


def let_more_come(server: socketserver.ThreadingTCPServer, sender: Sender) -> None:
    """Wait until what follows the reply is there."""
    ((connection, _),) = sender._idle
    server.has_been_read.set()  # type: ignore[attr-defined]
    assert select.select([connection._socket], [], [], 30)[0]


def test_a_second_reply_is_not_taken_for_the_next_request_s(server: socketserver.ThreadingTCPServer) -> None:
    second = whole(OK.replace(b"x-batch-rows: 7", b"x-batch-rows: 8"))
    sender, payload = set_up(server, (whole(OK), second), whole(OK))
    assert sender.send(payload).code is None
    let_more_come(server, sender)
    assert sender.send(payload).batch_rows == "7"
    (told,) = sender.unsolicited
    assert told.startswith(f"expected nothing between two requests, got {len(second)} bytes: b'HTTP/1.1 200 OK")
    assert server.connections == 2  # type: ignore[attr-defined]
    sender.close()


def test_what_comes_after_the_last_reply_is_found_at_the_end(server: socketserver.ThreadingTCPServer) -> None:
    sender, payload = set_up(server, (whole(OK), b"\n"))
    assert sender.send(payload).code is None
    let_more_come(server, sender)
    sender.close()
    assert sender.unsolicited == ["expected nothing between two requests, got 1 bytes: b'\\n'"]


def test_a_connection_that_the_server_closed_while_it_was_idle_costs_no_request(
    server: socketserver.ThreadingTCPServer,
) -> None:
    sender, payload = set_up(server, (whole(OK), None), whole(OK))
    assert sender.send(payload).code is None
    let_more_come(server, sender)
    assert sender.send(payload).code is None
    sender.close()
    assert sender.unsolicited == []
    assert server.connections == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (None, "connection"),
        (whole(b"HTTP/1.1 429 Too Many Requests\r\n", b'{"error": "full", "code": "overloaded"}'), "overloaded"),
        (whole(b"HTTP/1.1 502 Bad Gateway\r\n", b"<html>"), "http_502"),
        (whole(OK.replace(b"fused", b"eager")), "bad_reply"),
        (whole(OK.replace(b"x-encode-us", b"x-other-us")), "bad_reply"),
        (whole(OK.replace(b"x-encode-us: 40", b"x-encode-us: nan")), "bad_reply"),
        (whole(OK.replace(b"x-batch-rows: 7", b"x-batch-rows: many")), "bad_reply"),
        (b"garbage\r\n\r\n", "bad_reply"),
        (b"HTTP/1.1 abc\r\ncontent-length: 0\r\n\r\n", "bad_reply"),
        (OK + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", "bad_reply"),
        (OK + b"content-length: 3\r\n\r\n" + BODY, "bad_reply"),
        (whole(b"HTTP/1.1 503 Busy\r\n", b'{"error": "x", "code": "unsent"}'), "http_503"),
        (whole(b"HTTP/1.1 503 Busy\r\n", b'{"error": "x", "code": ["unsent"]}'), "http_503"),
        (whole(b"HTTP/1.1 500 Oh\r\n", b"[" * 100_000), "http_500"),
    ],
    ids=[
        "closed",
        "refused",
        "not ours",
        "other backend",
        "other version",
        "no time",
        "no rows",
        "garbage",
        "no status",
        "chunks",
        "longer than it says",
        "a code of our own",
        "no code",
        "deep",
    ],
)
def test_what_is_no_answer_has_a_code(server: socketserver.ThreadingTCPServer, reply: bytes | None, code: str) -> None:
    sender, payload = set_up(server, reply)
    assert sender.send(payload).code == code
    sender.close()


def test_nobody_who_listens_is_an_error_of_the_connection() -> None:
    target = Target("127.0.0.1", free_port(), "m", "json", 2, 1, seed=0)
    assert Sender(target).send(payloads(target, "fused", 1)[0]).code == "connection"
