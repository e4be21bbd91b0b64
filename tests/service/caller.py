"""A worker's loop, turned by hand, with a caller at the other end of a real socket, and what the caller sends."""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from models.staging import Staging
from service.listener import listen
from service.wire import Decoder, Frame, Kind
from service.worker import Profiling, WorkerServer
from tests.service.frames import packed

BACKENDS = ("eager", "fused")
FOREVER_NS = 10**18
HOUR_NS = 3600 * 10**9


class Caller:
    """A worker, and a connection to it."""

    def __init__(
        self,
        path: Path,
        run: Callable[..., Tensor],
        max_batch_rows: int = 64,
        hold_share: float = 0.0,
        profile: Callable[[int, str, Path], Profiling] | None = None,
        staging: Staging | None = None,
        **options: Any,
    ) -> None:
        self._listener = listen(path)
        options |= {"hold_share": hold_share, "profile": profile, "staging": staging}
        self.worker = WorkerServer(self._listener, run, BACKENDS, max_batch_rows, b"{}", **options)
        self.worker.listener.open()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._decoder = Decoder()
        self.turn()
        assert [frame.kind for frame in self.received()] == [Kind.HELLO]

    def send(self, *frames: Frame) -> None:
        self._socket.setblocking(True)
        self._socket.sendall(b"".join(map(packed, frames)))

    def turn(self) -> None:
        self.worker.turn()

    def received(self) -> list[Frame]:
        self._socket.setblocking(False)
        try:
            return self._decoder.feed(self._socket.recv(1 << 20))
        except BlockingIOError:
            return []

    def all_of(self, count: int) -> list[Frame]:
        """Wait for so many frames."""
        frames: list[Frame] = []
        self._socket.setblocking(True)
        while len(frames) < count:
            frames += self._decoder.feed(self._socket.recv(1 << 20))
        return frames

    def close(self) -> None:
        self._socket.close()
        self.worker.listener.close()
        self._listener.close()


def infer(request_id: int, rows: int = 1, backend: int = 0, deadline_ns: int = FOREVER_NS) -> Frame:
    values = np.full((rows, 2), request_id, dtype=np.float32)
    return Frame(Kind.INFER, request_id, values.tobytes(), backend, rows, time.monotonic_ns(), deadline_ns)


def profile_frame(request_id: int, rows: int = 3, backend: int = 1, deadline_ns: int = FOREVER_NS) -> Frame:
    return Frame(Kind.PROFILE, request_id, b"trace.json", backend, rows, time.monotonic_ns(), deadline_ns)
