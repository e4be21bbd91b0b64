"""What stands between uvicorn's protocol and the socket.

Replies leave in one segment, what is read ahead is bounded, and a connection that ends in mid-request ends without a
reset.
"""

import asyncio
from collections.abc import Callable, Sized
from typing import Any, cast

from uvicorn.protocols.http.flow_control import FlowControl

STATUS_LINE_START = b"HTTP/1.1 "
LINGER_BYTES = 256 << 20
LINGER_S = 2.0


class JoiningTransport:
    """Holds a reply's head back until its body comes, so that both leave in one write and arrive in one segment.

    uvicorn writes them one after the other, and its event loop sends each at once.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        """`close` closes the connection."""
        self._transport = transport
        self._loop = loop
        self._close = close
        self._head = b""

    def end(self, lingering: "Lingering") -> None:
        """Write nothing from now on."""
        self._transport = cast("asyncio.Transport", lingering)

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
        self._close()

    def __getattr__(self, name: str) -> Any:
        """Leave the rest to the transport."""
        return getattr(self._transport, name)


class Lingering(asyncio.Protocol):
    """The end of a connection in mid-request: nothing is written any more, and what still comes is dropped, in bounds.

    A client that is still sending when the socket closes gets a reset, which may take the reply from it. To the
    protocol whose connection it ends this is a transport that is closing.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol
    ) -> None:
        """Take a connection over from `protocol`, which is told of its loss."""
        self._transport = transport
        self._protocol = protocol
        self._bytes = 0
        self.close = transport.close
        self.abort = transport.abort
        self.get_write_buffer_size = transport.get_write_buffer_size
        transport.write_eof()
        transport.set_protocol(self)
        transport.resume_reading()
        self._timer = loop.call_later(LINGER_S, transport.close)

    def is_closing(self) -> bool:
        """Say that nothing can be written."""
        return True

    def pause_reading(self) -> None:
        """Read on: what comes is not kept."""

    def resume_reading(self) -> None:
        """Read on."""

    def data_received(self, data: bytes) -> None:
        """Drop it."""
        self._bytes += len(data)
        if self._bytes > LINGER_BYTES:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the protocol."""
        self._timer.cancel()
        self._protocol.connection_lost(exc)


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
