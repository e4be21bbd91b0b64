"""uvicorn's HTTP protocol, with one write per reply, and the one form that errors have for bytes that are no HTTP."""

import asyncio
import re
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = b"HTTP/1.1 "
MAX_HEAD_BYTES = 64 << 10
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
)


class JoiningTransport:
    """Holds a reply's head back until its body comes, so that both leave in one write and arrive in one segment.

    uvicorn writes them one after the other, and its event loop sends each at once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Write, or hold back what looks like a head; a reply without a body is written in the next loop turn."""
        if self._transport.is_closing():  # the client has gone meanwhile
            return
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(HEAD) and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write a head that is held back."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def close(self) -> None:
        """Write what is held back, then close."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Leave the rest to the transport."""
        return getattr(self._transport, name)


class Protocol(HttpToolsProtocol):
    """Joins head and body, bounds the head, and answers what cannot be parsed before there is a request to be seen."""

    _head_bytes = 0
    _is_in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Put the joining transport in front of the real one."""
        super().connection_made(cast("asyncio.Transport", JoiningTransport(transport, self.loop)))

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless a request's line and headers are longer than any that is meant."""
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and b"\r\n\r\n" not in data[:MAX_HEAD_BYTES]:
                self.send_400_response(f"more than {MAX_HEAD_BYTES} bytes of headers")
                return
            if UPGRADE.search(
                data
            ):  # an offer that may be ignored, but that the parser takes up and drops the body for
                head, gap, body = data.partition(b"\r\n\r\n")
                data = UPGRADE.sub(b"\r\nx-upgrade-ignored:", head) + gap + body
        super().data_received(data)

    def on_headers_complete(self) -> None:
        """Start counting anew with the next request."""
        self._is_in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next request's head."""
        self._is_in_head = True
        super().on_message_complete()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer what is in flight before closing: a client may have closed only its own side."""
        if self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer and close the connection."""
        error = f"expected an HTTP/1.1 request: {msg}"
        body = orjson.dumps({"error": error, "code": "bad_request"})
        self.transport.write(BAD_REQUEST % (len(body), body))
        self.transport.close()
