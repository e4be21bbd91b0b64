"""uvicorn's HTTP protocol, with one write per reply, and the one form that errors have for bytes that are no HTTP."""

import asyncio
from typing import Any, cast

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD = b"HTTP/1.1 "
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
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(HEAD) and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self.flush)
            return
        self._transport.write(data)

    def flush(self) -> None:
        """Write a head that is held back."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        """Write what is held back, then close."""
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        """Leave the rest to the transport."""
        return getattr(self._transport, name)


class Protocol(HttpToolsProtocol):
    """Joins head and body; answers what cannot be parsed, before there is a request that the app could see."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Put the joining transport in front of the real one."""
        super().connection_made(cast("asyncio.Transport", JoiningTransport(transport, self.loop)))

    def send_400_response(self, msg: str) -> None:
        """Answer and close the connection."""
        error = f"expected an HTTP/1.1 request, got bytes that are none: {msg}"
        body = orjson.dumps({"error": error, "code": "bad_request"})
        self.transport.write(BAD_REQUEST % (len(body), body))
        self.transport.close()
