"""What an API process does besides answering requests: it keeps its connections, and shuts down in order."""

import asyncio
import contextlib
import multiprocessing
import signal
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from setproctitle import setproctitle

from service.child_processes import unblock_signals
from service.heap import freeze_heap
from service.inference import Inference
from service.metrics import Metrics
from service.watch import ANSWER_S, NOTICE_S

if TYPE_CHECKING:
    from service.traces import Traces


def lifespan(
    original: Any,
    inference: Inference,
    metrics: Metrics,
    configure_logs: Callable[[], None],
    make_traces: "Callable[[], Traces] | None",
) -> Any:
    """Start and end what an API process does besides answering requests.

    `configure_logs` undoes what LitServe set. `make_traces`, if there are to be any, is called in this process, since
    it starts a thread.
    """
    dispatcher = inference.dispatcher

    @contextlib.asynccontextmanager
    async def wrapped(app: FastAPI) -> AsyncIterator[Any]:
        setproctitle("fused-mlp-server: http")
        process = process_number()
        metrics.claim(process)
        configure_logs()
        loop = asyncio.get_running_loop()
        finish = signal.getsignal(signal.SIGTERM)  # uvicorn's: stop listening, answer what is in flight, end
        assert callable(finish)  # noqa: S101

        def drain() -> None:
            dispatcher.state.start_draining()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, lambda: None)  # a second one changes nothing
            loop.call_later(NOTICE_S, finish, signal.SIGTERM, None)
            loop.call_later(ANSWER_S, dispatcher.pool.give_up)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, drain)
        unblock_signals()
        parent = multiprocessing.parent_process()
        if parent:
            sentinel = parent.sentinel

            def lose_parent() -> None:
                loop.remove_reader(sentinel)
                drain()

            loop.add_reader(sentinel, lose_parent)
        inference.traces = make_traces() if make_traces else None
        dispatcher.pool.start(process)
        freeze_heap()
        try:
            async with original(app) as state:
                yield state
        finally:
            await dispatcher.pool.close()
            if inference.traces:
                inference.traces.close()

    return wrapped


def process_number() -> int:
    """Return this HTTP process's number, from 0, which LitServe puts into its name."""
    return int(multiprocessing.current_process().name.removeprefix("LitServer-"))
