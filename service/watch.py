"""Watches the server's processes from its parent: the start, the signals, a failure that nothing else would notice."""

import contextlib
import logging
import multiprocessing
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import litserve as ls
import orjson
from litserve.utils import WorkerSetupStatus

from service.shared_state import SharedState
from service.wire import Decoder, Kind

Hello = dict[str, Any]
POLL_S = 0.05
STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT})


class Watch(threading.Thread):
    """Watches what LitServe does not, and turns signals and failures into one orderly end.

    Signals are taken by this thread alone: they stay blocked in the others, and in the processes that these start until
    each is ready to end in order. So none can strike in the middle of starting a process.
    """

    def __init__(
        self,
        host: ls.LitServer,
        state: SharedState,
        sockets: list[Path],
        address: tuple[str, int],
        announce: Callable[[list[Hello]], None],
    ) -> None:
        """`announce` is called once, with every worker's first frame, when all are warm and `address` answers."""
        super().__init__(name="watch", daemon=True)
        self._host = host
        self._state = state
        self._sockets = sockets
        self._address = address
        self._announce = announce
        self._ready: dict[int, Hello] = {}
        self._api_processes: set[int] = set()
        self.is_stopping = False
        self.exit_status = 0
        logging.getLogger("litserve.server").addFilter(self._is_news)

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Drop the complaint of LitServe's monitor, which polls the manager until after it has been shut down."""
        return not (self.is_stopping and record.msg == "Monitoring worker crashed")

    def fail(self, message: str) -> None:
        """Say what went wrong and end the server with exit status 1."""
        self.exit_status = 1
        print(f"error: {message}", file=sys.stderr, flush=True)

    def run(self) -> None:
        """Wait for a signal and look after the processes in turn, until the server stops."""
        is_announced = False
        while not self.is_stopping:
            if signal.sigtimedwait(STOP_SIGNALS, POLL_S):
                break
            reason = self._failure()
            if reason:
                self.fail(reason)
                break
            self._greet_workers()
            if not is_announced and len(self._ready) == len(self._sockets) and self._answers():
                self._announce(list(self._ready.values()))
                is_announced = True
        self.is_stopping = True
        self._state.start_draining()
        self._end_host()

    def _end_host(self) -> None:
        """Let LitServe's `run` return, from its wait or from its start, by what it looks at itself."""
        while not hasattr(self._host, "_transport"):  # its last preparation before workers are started
            time.sleep(POLL_S)
        with contextlib.suppress(Exception):  # it has ended by itself, and its manager with it
            self._host._shutdown_event.set()
            self._host.workers_setup_status["stop"] = WorkerSetupStatus.ERROR

    def _failure(self) -> str | None:
        for index, process in enumerate(getattr(self._host, "inference_workers", [])):
            if process.exitcode is not None and index not in self._ready:
                ending = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit status {process.exitcode}"
                return (
                    f"worker {index} ended while starting, with {ending}; its own message stands above, if it had one"
                )
        alive = {child.pid for child in multiprocessing.active_children() if child.name.startswith("LitServer-")}
        if self._api_processes - alive:
            return "an HTTP process ended unexpectedly; the server stops, so that it can be started anew"
        self._api_processes |= {pid for pid in alive if pid is not None}
        return None

    def _greet_workers(self) -> None:
        for index, path in enumerate(self._sockets):
            if index not in self._ready:
                with contextlib.suppress(OSError):
                    self._ready[index] = greet(path)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=1):
            return True
        return False


def block_signals() -> None:
    """Keep SIGTERM and SIGINT from this thread and from what it starts."""
    resource_tracker.ensure_running()  # it unblocks them when it starts, so it starts now
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def unblock_signals() -> None:
    """Take SIGTERM and SIGINT from now on, and those that came meanwhile."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def greet(path: Path) -> Hello:
    """Connect to a worker's socket and return its first frame, which it sends when warm.

    Raises:
        OSError: nobody listens there yet.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        decoder = Decoder()
        while data := connection.recv(1 << 16):
            for frame in decoder.feed(data):
                if frame.kind == Kind.HELLO:
                    hello: Hello = orjson.loads(frame.payload)
                    return hello
    raise ConnectionError(f"{path}: closed before its first frame")


def end_children() -> None:
    """End whatever LitServe has left running, and wait for it, so that nothing outlives this process."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
    for child in children:
        child.join(timeout=2)
        if child.is_alive():
            child.kill()
            child.join()
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # it would end some moments after us
