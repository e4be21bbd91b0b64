"""The workers that one HTTP process is connected to, over real sockets."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from service.admission import Admission
from service.backends import Backends
from service.errors import NotReadyError
from service.link import WorkerLink
from service.metrics import Metrics
from service.pool import InFlight, WorkerPool
from service.shared_state import SharedState
from service.wire import Frame, Kind
from tests.service.far_worker import array
from tests.service.frames import packed

READY = {"eager": {"implementation": "torch", "state": "ready", "reason": None}}
HELLO = packed(Frame(Kind.HELLO, 0, orjson.dumps({"backends": READY})))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Worker(asyncio.Protocol):
    """Greets who connects, and keeps the connection."""

    def __init__(self, opened: list[asyncio.Transport]) -> None:
        self._opened = opened
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._opened.append(transport)
        transport.write(HELLO)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._opened.remove(self._transport)


def test_requests_go_to_the_least_loaded_worker_and_one_that_comes_back_is_found(tmp_path: Path) -> None:
    async def run() -> None:
        state = SharedState(1, 1)
        backends = Backends(("eager",), state, Metrics(("eager",), 1))
        sockets = [tmp_path / f"worker-{index}.sock" for index in range(2)]
        told: list[InFlight] = []
        admission = Admission(8, 8, 2, batch_rows=8, workers=1)
        pool = WorkerPool(sockets, backends, state, lambda: told.append(pool.in_flight), 30.0, admission)
        with pytest.raises(NotReadyError):
            pool.least_loaded()
        pool.start(0)
        assert told == [(0, 0)]  # before any worker is there
        loop = asyncio.get_running_loop()
        opened: list[asyncio.Transport] = []
        first = await loop.create_unix_server(lambda: Worker(opened), sockets[0])
        await until(lambda: backends.default() == "eager")
        assert (pool.is_ready, state.are_all_ready) == (False, False)
        second = await loop.create_unix_server(lambda: Worker(opened), sockets[1])
        await until(lambda: pool.is_ready)
        assert state.are_all_ready
        chosen: list[WorkerLink] = []
        for rows in (3, 1, 1, 2):
            link = pool.least_loaded()
            link.send(array(*[[1.0, 2.0]] * rows), 0, time.monotonic_ns(), 30.0, lambda _: None)
            chosen.append(link)
        three, *others = (link.name for link in chosen)
        assert set(others) == {"worker-0", "worker-1"} - {three}
        assert (*pool.in_flight, pool.unanswered) == (7, 6, 4)
        opened[0].close()
        await until(lambda: not pool.is_ready)
        assert (pool.least_loaded().name, state.are_all_ready) == ("worker-1", False)
        await until(lambda: pool.is_ready)
        assert pool.least_loaded().name == "worker-0"
        await pool.close()
        await until(lambda: not opened)
        for server in (first, second):
            server.close()

    asyncio.run(run())
