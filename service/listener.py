"""A worker's end of its connections: API processes connect to one Unix socket, and frames are read and written.

`service.link` is the other end.
"""

import selectors
import socket
from collections import deque
from collections.abc import Callable
from pathlib import Path

from service.wire import Decoder, Frame, Kind, header

RECEIVE_BYTES = 1 << 20


class Client:
    """One API process: its socket, what it has sent and what it is still owed."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.decoder = Decoder()
        self.outgoing: deque[bytes | memoryview] = deque()


class Listener:
    """Serves its clients as far as their sockets allow, without ever waiting for one of them."""

    def __init__(
        self,
        listening: socket.socket,
        hello: bytes,
        take: Callable[[Client, list[Frame]], None],
        forget: Callable[[Client], None],
    ) -> None:
        """`hello` is each connection's first frame; `take` gets the frames that come, `forget` the clients that go."""
        self.clients: set[Client] = set()
        self._listening = listening
        self._hello = hello
        self._take = take
        self._forget = forget
        self._selector = selectors.DefaultSelector()
        self.select = self._selector.select
        """Returns what is ready; the `data` of each key is to be called with its events."""

    def open(self) -> None:
        """Accept connections from now on."""
        self.watch(self._listening, lambda _: self.adopt(self._listening.accept()[0]))

    def watch(self, source: socket.socket | int, call: Callable[[int], object]) -> None:
        """Call `call` with the events when there is something to read."""
        self._selector.register(source, selectors.EVENT_READ, call)

    def ignore(self, source: socket.socket | int) -> None:
        """Watch it no longer."""
        self._selector.unregister(source)

    @property
    def is_writing(self) -> bool:
        """Whether part of a frame is still to be written."""
        return any(client.outgoing for client in self.clients)

    @property
    def is_reading(self) -> bool:
        """Whether part of a frame has come and the rest has not."""
        return any(client.decoder.is_in_frame for client in self.clients)

    def adopt(self, connection: socket.socket) -> None:
        """Serve one more connection."""
        connection.setblocking(False)
        client = Client(connection)
        self.clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda events: self._serve(client, events))
        self.send(client, header(Kind.HELLO, 0, len(self._hello)) + self._hello)

    def send(self, client: Client, data: bytes) -> None:
        """Write what the socket takes, and the rest when it takes more; nothing to a client that is gone."""
        if client not in self.clients:
            return
        client.outgoing.append(data)
        self._flush(client)

    def close(self) -> None:
        """End all connections."""
        for client in list(self.clients):
            self._drop(client)
        self._selector.close()

    def _serve(self, client: Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if not events & selectors.EVENT_READ or client not in self.clients:
            return
        try:
            data = client.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(client)
            return
        self._take(client, client.decoder.feed(data))

    def _drop(self, client: Client) -> None:
        self.clients.discard(client)
        self._forget(client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _flush(self, client: Client) -> None:
        try:
            while client.outgoing:
                data = client.outgoing[0]
                sent = client.socket.send(data)
                if sent < len(data):
                    client.outgoing[0] = memoryview(data)[sent:]
                else:
                    client.outgoing.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        key = self._selector.get_key(client.socket)
        if key.events != wanted:
            self._selector.modify(client.socket, wanted, key.data)


def listen(path: Path) -> socket.socket:
    """Listen on a Unix socket, in place of one that an ended worker left."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    return listener
