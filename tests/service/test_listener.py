"""A worker's connections, turned by hand, with callers at the other end of real sockets."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.listener import Client, Listener, listen
from service.wire import Decoder, Frame, Kind
from tests.service.frames import packed

CANCEL = Frame(Kind.CANCEL, 7, b"")


class Serving:
    """A listener that keeps what it takes, and forgets nobody silently."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._listening = listen(path)
        self.taken: list[Frame] = []
        self.gone: list[Client] = []
        self.listener = Listener(self._listening, b"{}", lambda _, frames: self.taken.extend(frames), self.gone.append)
        self.listener.open()

    def connect(self) -> socket.socket:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.connect(str(self._path))
        self.turn()
        return caller

    def turn(self) -> None:
        for key, events in self.listener.select(0):
            key.data(events)

    def close(self) -> None:
        self.listener.close()
        self._listening.close()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    made = Serving(tmp_path / "worker-0.sock")
    yield made
    made.close()


def test_each_connection_is_greeted_and_its_whole_frames_are_taken(serving: Serving) -> None:
    with serving.connect() as caller:
        assert [frame.kind for frame in Decoder().feed(caller.recv(1 << 16))] == [Kind.HELLO]
        data = packed(CANCEL) * 2
        caller.sendall(data[:-1])
        serving.turn()
        assert (len(serving.taken), serving.listener.is_reading) == (1, True)
        caller.sendall(data[-1:])
        serving.turn()
        assert (len(serving.taken), serving.listener.is_reading) == (2, False)


def test_what_a_socket_does_not_take_is_written_when_it_is_read(serving: Serving) -> None:
    with serving.connect() as slow, serving.connect() as other:
        first, second = sorted(serving.listener.clients, key=lambda client: client.socket.fileno())
        payload = bytes(range(256)) * (1 << 14)  # 4 MiB, more than a buffer
        serving.listener.send(first, packed(Frame(Kind.RESULT, 1, payload)))
        assert serving.listener.is_writing
        serving.listener.send(second, packed(CANCEL))
        decoder = Decoder()
        assert [frame.kind for frame in decoder.feed(other.recv(1 << 16))] == [Kind.HELLO, Kind.CANCEL]
        decoder, frames = Decoder(), list[Frame]()
        slow.setblocking(False)
        while len(frames) < 2:
            serving.turn()
            with contextlib.suppress(BlockingIOError):
                frames += decoder.feed(slow.recv(1 << 16))
        assert frames[1].payload == payload
        assert not serving.listener.is_writing


def test_a_caller_that_is_gone_is_forgotten_and_what_is_sent_to_it_is_dropped(serving: Serving) -> None:
    with serving.connect(), contextlib.ExitStack() as ends:
        (staying,) = serving.listener.clients
        for reads in (True, False):
            caller = ends.enter_context(serving.connect())
            (leaving,) = serving.listener.clients - {staying}
            caller.close()
            if reads:
                serving.turn()
            else:
                serving.listener.send(leaving, packed(CANCEL))  # which finds the other end closed
            assert serving.gone.pop() is leaving
            assert serving.listener.clients == {staying}
            serving.listener.send(leaving, packed(CANCEL))


def test_a_socket_that_an_ended_worker_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.sock"
    listen(path).close()
    assert path.exists()
    with contextlib.closing(Serving(path)) as serving, serving.connect():
        assert len(serving.listener.clients) == 1
