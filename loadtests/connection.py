"""One keep-alive HTTP connection that costs next to nothing itself: bytes made beforehand out, a whole reply in."""

import re
import socket
import time
from typing import Self

from loadtests.errors import LoadTestError

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class UnexpectedReplyError(LoadTestError):
    """The server answered another status than 200, or ended the connection."""


def post(path: str, body: bytes) -> bytes:
    """Return the bytes of a POST request with a JSON body."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class Connection:
    """A connection that sends one request at a time."""

    def __init__(self, host: str, port: int, timeout_s: float = 30.0) -> None:
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self._socket.close()

    def time_ns(self, request: bytes) -> int:
        """Send one request, read its whole reply, and return how long that took.

        Raises:
            UnexpectedReplyError: the status is not 200, or the connection ended first.
        """
        start = time.perf_counter_ns()
        self._socket.sendall(request)
        reply = self._socket.recv(1 << 16)
        end = reply.find(b"\r\n\r\n")
        while end < 0:
            data = self._socket.recv(1 << 16)
            if not data:
                raise UnexpectedReplyError("the server closed the connection before its reply's head was whole")
            reply += data
            end = reply.find(b"\r\n\r\n")
        declared = LENGTH.search(reply, 0, end + 2)
        left = end + 4 + (int(declared[1]) if declared else 0) - len(reply)
        while left > 0:
            data = self._socket.recv(left)
            if not data:
                raise UnexpectedReplyError("the server closed the connection in mid-reply")
            reply += data
            left -= len(data)
        elapsed = time.perf_counter_ns() - start
        if not reply.startswith(b"HTTP/1.1 200"):
            raise UnexpectedReplyError(f"expected status 200, got: {reply[:300]!r}")
        return elapsed
