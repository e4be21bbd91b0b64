"""One keep-alive HTTP connection that costs next to nothing itself: it sends prepared bytes and reads a whole reply.

That is why load goes over it as well: it takes a quarter of the CPU time per request of locust's FastHttpUser, and less
than half of geventhttpclient's, so that one core drives four times the load.
"""

import re
import select
import socket
import time
from collections.abc import Mapping
from typing import Any, Self

from gevent.monkey import get_original

from loadtests.errors import LoadTestError

LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,18})[ \t]*\r", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nconnection:[ \t]*close[ \t]*\r", re.IGNORECASE)
STATUS = re.compile(rb"HTTP/1\.[01] [1-5]\d\d[ \r]")
HEAD_LIMIT = 1 << 16  # bytes
BODY_LIMIT = 1 << 30

_poll: Any = get_original("select", "poll")  # one system call; gevent's goes through the event loop


class UnexpectedReplyError(LoadTestError):
    """The server answered another status than 200, or ended the connection."""


class MalformedReplyError(UnexpectedReplyError):
    """What the server sent is not an HTTP reply that gives its length."""


class UnsolicitedReplyError(UnexpectedReplyError):
    """Bytes came over a connection whose requests had all been answered."""


def post(path: str, body: bytes, headers: Mapping[str, str] | None = None, host: str = "localhost") -> bytes:
    """Return the bytes of a POST request; its body is JSON unless the headers say otherwise."""
    lines = (
        {"host": host, "content-type": "application/json"} | dict(headers or {}) | {"content-length": f"{len(body)}"}
    )
    head = f"POST {path} HTTP/1.1\r\n" + "\r\n".join(f"{name}: {value}" for name, value in lines.items())
    return head.encode() + b"\r\n\r\n" + body


class Connection:
    """A connection that sends one request at a time."""

    def __init__(self, host: str, port: int, timeout_s: float = 30.0) -> None:
        self._timeout_s = timeout_s
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        poller = _poll()
        poller.register(self._socket, select.POLLIN)
        self._look = poller.poll

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def check_quiet(self) -> bool:
        """Check between two requests that nothing came; return whether the connection is still open.

        Where the server ended it, or something came, it is closed. Without this the rest of a reply, or a second one,
        would be taken for the reply to the next request.

        Raises:
            UnsolicitedReplyError: bytes came that no request had asked for.
        """
        if not self._look(0):
            return True
        try:
            data = self._socket.recv(1 << 16)
        except OSError:  # reset by the server
            data = b""
        self.close()
        if data:
            raise UnsolicitedReplyError(f"expected nothing between two requests, got {len(data)} bytes: {data[:80]!r}")
        return False

    def require_open(self) -> None:
        """Check between two requests that the next one can be sent.

        Raises:
            UnsolicitedReplyError: bytes came that no request had asked for.
            UnexpectedReplyError: the server closed the connection.
        """
        if not self.check_quiet():
            raise UnexpectedReplyError("the server closed the connection between two requests")

    def exchange(self, request: bytes) -> tuple[bytes, bytes]:
        """Send one request and return its whole reply: the head with its empty line, and the body.

        Raises:
            MalformedReplyError: what came is no reply of HTTP, or does not say its length, or is longer than that.
            UnexpectedReplyError: the connection ended first.
            OSError: it could not be sent or read; TimeoutError where the whole reply did not come in time.
        """
        sent = self._socket.send(request)  # all of it, mostly; gevent's sendall asks the socket for its type first
        if sent < len(request):
            self._socket.sendall(memoryview(request)[sent:])
        reply = self._socket.recv(1 << 16)
        end, limit_s = reply.find(b"\r\n\r\n"), None
        while end < 0:
            if len(reply) > HEAD_LIMIT:
                raise MalformedReplyError(f"expected an HTTP reply, got {len(reply)} bytes without the end of a head")
            limit_s = self._limit_s(limit_s)
            data = self._socket.recv(1 << 16)
            if not data:
                raise UnexpectedReplyError("the server closed the connection before its reply's head was whole")
            reply += data
            end = reply.find(b"\r\n\r\n")
        start = end + 4
        declared = LENGTH.search(reply, 0, end + 2)
        if declared is None or STATUS.match(reply) is None:
            raise MalformedReplyError(f"expected an HTTP reply with its content-length, got {reply[:80]!r}")
        left = start + int(declared[1]) - len(reply)
        if left == 0:
            return reply[:start], reply[start:]
        if left < 0 or left > BODY_LIMIT:
            told = f"expected a body of {int(declared[1])} bytes, as its head says, "
            raise MalformedReplyError(told + ("got more" if left < 0 else f"and at most {BODY_LIMIT}"))
        pieces = [reply[start:]]
        while left > 0:
            limit_s = self._limit_s(limit_s)
            data = self._socket.recv(min(left, 1 << 20))
            if not data:
                raise UnexpectedReplyError("the server closed the connection in mid-reply")
            pieces.append(data)
            left -= len(data)
        return reply[:start], b"".join(pieces)

    def _limit_s(self, limit_s: float | None) -> float:
        """Return by when the rest of a reply has to come, which the socket's own time limit does not bound.

        Raises:
            TimeoutError: that is past.
        """
        now_s = time.monotonic()
        if limit_s is None:
            return now_s + self._timeout_s
        if now_s > limit_s:
            raise TimeoutError(f"no whole reply within {self._timeout_s:g} s")
        return limit_s

    def time_ns(self, request: bytes) -> int:
        """Send one request, read its whole reply, and return how long that took.

        Raises:
            UnexpectedReplyError: the status is not 200, or the connection ended first, or something came before.
        """
        self.require_open()
        start = time.perf_counter_ns()
        head, body = self.exchange(request)
        elapsed = time.perf_counter_ns() - start
        if not head.startswith(b"HTTP/1.1 200"):
            raise UnexpectedReplyError(f"expected status 200, got: {head + body[:300]!r}")
        return elapsed


def status_of(head: bytes) -> int:
    """Return the status of a reply's head."""
    return int(head[9:12])


def is_last(head: bytes) -> bool:
    """Whether a reply's head says that the server closes the connection after it."""
    return CLOSE.search(head) is not None


def headers_of(head: bytes) -> dict[str, str]:
    """Return the headers of a reply's head, names in lower case."""
    lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:-2])
    return {name.lower(): value.strip() for name, _, value in lines}
