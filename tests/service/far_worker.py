"""A dispatcher whose one worker is at the other end of a byte string."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from models.engine import BackendStatus
from service.admission import Admission
from service.dispatch import Dispatcher
from service.link import WorkerLink
from service.metrics import Metrics
from service.profile import NullTransport, connected
from service.schemas import Rows
from service.shared_state import SharedState
from service.wire import Decoder, Frame, Kind
from tests.service.exposition import value
from tests.service.frames import packed

BACKENDS = ("eager", "compiled", "fused")
MAX_QUEUE_ROWS = 40


def array(*rows: list[float]) -> Rows:
    return np.array(rows, dtype=np.float32)


def looped(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on an event loop."""

    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


class FarWorker:
    """A dispatcher, and the worker's end of its one connection."""

    def __init__(self, timeout_s: float = 30.0, counted_rows: int = MAX_QUEUE_ROWS) -> None:
        self.metrics = Metrics(BACKENDS, 1)
        self.state = SharedState(1, len(BACKENDS))
        sockets = [Path("worker-0.sock")]
        self.admission = Admission(MAX_QUEUE_ROWS // 2, MAX_QUEUE_ROWS, counted_rows, batch_rows=1, workers=1)
        self.dispatcher = Dispatcher(sockets, BACKENDS, self.state, self.admission, timeout_s, self.metrics)
        self.link: WorkerLink
        self._transport: NullTransport
        self.link, self._transport = connected(
            self.dispatcher, dict.fromkeys(BACKENDS, BackendStatus("onednn", "ready"))
        )
        self._decoder = Decoder()

    async def sent(self) -> list[Frame]:
        """What the worker got since the last time."""
        await asyncio.sleep(0)
        return self._decoder.feed(self._transport.take())

    def answer(self, frame: Frame, rows: Rows, compute_ns: int = 1) -> None:
        """Let the worker answer a frame."""
        answer = (Kind.RESULT, frame.request_id, rows.tobytes(), frame.backend, len(rows))
        result = Frame(*answer, 1, compute_ns, len(rows), 1)
        self.link.data_received(packed(result))

    def let_go(self, request_id: int) -> None:
        """Let the worker say that it has cancelled a frame."""
        self.link.data_received(packed(Frame(Kind.CANCELLED, request_id, b"")))

    def metric(self, name: str, **labels: str) -> float:
        return value(self.metrics.text().decode(), name, **labels)
