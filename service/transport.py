"""What stands between uvicorn's protocol and the socket: replies in one segment, and a bound on what is read ahead."""

import asyncio
from collections.abc import Sized
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl

STATUS_LINE_START = b"HTTP/1.1 "


class JoiningTransport:
    """Holds a reply's head back until its body comes, so that both leave in one write and arrive in one segment.

    uvicorn writes them one after the other, and its event loop sends each at once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Write, but hold back what looks like a head; the head of a reply without a body leaves in the next turn."""
        if self._transport.is_closing():  # the client has gone meanwhile
            return
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(STATUS_LINE_START) and data.endswith(b"\r\n\r\n"):
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


class Flow(FlowControl):
    """Pauses reading while requests that were sent ahead wait for their turn, parsed or not."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline
        self.is_behind = False
        """Whether bytes have been read that are not parsed yet."""

    def resume_reading(self) -> None:
        """Read on, if nothing waits."""
        if not self._pipeline and not self.is_behind:
            super().resume_reading()
