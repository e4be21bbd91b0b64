"""Watches the server's processes from the parent: the start, signals, and failures that nothing else would notice."""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import litserve as ls
import orjson
from litserve.utils import WorkerSetupStatus

from service import logs
from service.child_processes import ending, stop_signals
from service.metrics import Metrics
from service.shared_state import SharedState
from service.wire import Decoder, Kind

Hello = dict[str, Any]
POLL_S = 0.05
NOTICE_S = 0.2  # between refusing new requests and closing idle connections, so that clients see the refusal
REFUSE_S = 0.15  # what uvicorn takes to stop accepting, once it is told
ANSWER_S = 5.0  # what accepted requests have to be answered in, once the server stops
END_S = 6.5  # when what has not ended by then is killed
START_FAILED = 2  # exit status of a worker that has itself said why, and of a server that could not start as asked
LOST_MANAGER = (EOFError, ConnectionError)  # what is raised to those who ask a manager that has ended
log = logging.getLogger(__name__)


class Watch(threading.Thread):
    """Watches what LitServe does not, and turns signals and failures into one orderly shutdown.

    Only this thread takes signals: they stay blocked in the others, and in the processes that those start until each
    can shut down in order. So none can strike in the middle of starting a process.
    """

    def __init__(
        self,
        host: ls.LitServer,
        state: SharedState,
        sockets: list[Path],
        address: tuple[str, int],
        announce: Callable[[list[Hello]], None],
        metrics: Metrics,
    ) -> None:
        """`announce` is called once, with every worker's first frame, when all are ready and `address` answers."""
        super().__init__(name="watch", daemon=True)
        self._host = host
        self._state = state
        self._sockets = sockets
        self._address = address
        self._announce = announce
        self._metrics = metrics
        self._signals = stop_signals()
        self._workers: dict[int, Any] = {}  # the processes as last seen; LitServe replaces one that has ended
        self._ready: dict[int, Hello] = {}
        self._lasting: set[str] = set()  # the names of the processes, as last seen, that nobody restarts
        self.is_stopping = False
        self.exit_status = 0
        logging.getLogger("litserve.server").addFilter(self._is_news)

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Drop LitServe's complaints about an orderly end: its monitor polls the manager until after that has ended."""
        if self.is_stopping and str(record.msg).endswith(": Already not alive."):
            return False
        if record.msg != "Monitoring worker crashed":
            return True
        error = record.exc_info[1] if record.exc_info else None
        return not (self.is_stopping or isinstance(error, LOST_MANAGER))

    def fail(self, message: str, exit_status: int = 1) -> None:
        """Say what went wrong, unless something was said already, and let the server end with this exit status."""
        is_news, self.exit_status = not self.exit_status, self.exit_status or exit_status
        if message and is_news:
            logs.tell_error(message)

    def run(self) -> None:
        """Wait for a signal and look after the processes in turn, until the server stops, then end it in order."""
        try:
            self._look_after_processes()
        except Exception as error:  # nobody else takes the signals
            log.exception("the watch over the server's processes failed")
            self.fail(f"the watch over the server's processes failed: {type(error).__name__}: {error}")
        finally:
            self._end()

    def _look_after_processes(self) -> None:
        is_announced = False
        while not self.is_stopping:
            received = signal.sigtimedwait(self._signals, POLL_S)
            # Python gives something, and no signal, where the process was stopped for longer than that and continued.
            if received is not None and received.si_signo in self._signals:
                break
            failure = self._failure()
            if failure:
                self.fail(*failure)
                break
            self._greet_workers()
            self._count_restarts()
            is_ready = len(self._ready) == len(self._sockets) and self._state.are_all_ready
            if not is_announced and is_ready and self._answers():
                self._announce(list(self._ready.values()))
                is_announced = True

    def _end(self) -> None:
        self.is_stopping = True
        self._state.start_draining()
        threading.Thread(target=self._end_host, daemon=True).start()  # it asks the manager, which may not answer
        self._terminate()
        time.sleep(NOTICE_S + REFUSE_S)
        refuse_connections(self._address[1])
        time.sleep(END_S - NOTICE_S - REFUSE_S)
        for child in multiprocessing.active_children():
            child.kill()  # every request is answered by now; a batch that still computes is of no use to anybody

    def _end_host(self) -> None:
        """Let LitServe's `run` return, whether it waits or still starts, by setting what it checks itself."""
        while not hasattr(self._host, "_transport"):  # its last preparation before workers are started
            time.sleep(POLL_S)
        with contextlib.suppress(Exception):  # it has ended by itself, and its manager with it
            self._host._shutdown_event.set()
            self._host.workers_setup_status["stop"] = WorkerSetupStatus.ERROR

    def _terminate(self) -> None:
        """Tell all processes to end at once: LitServe ends them one after the other."""
        for child in multiprocessing.active_children():
            if child.name.startswith(("LitServer-", "inference-worker")):
                child.terminate()

    def _failure(self) -> tuple[str, int] | None:
        alive = {child.name for child in multiprocessing.active_children()}
        for name in sorted(self._lasting - alive, reverse=True):
            return (lost("LitServe's manager") if name.startswith("SyncManager-") else lost("an HTTP process")), 1
        self._lasting |= {name for name in alive if name.startswith(("LitServer-", "SyncManager-"))}
        for index, latest in enumerate(getattr(self._host, "inference_workers", [])):
            process = self._workers.setdefault(index, latest)
            if process.exitcode is not None and index not in self._ready:
                if process.exitcode == START_FAILED:
                    return "", START_FAILED
                return f"worker {index} ended while starting, with {ending(process)}", 1
            directory = self._sockets[index].parent
            if process.exitcode is not None and not directory.is_dir():
                told = f"worker {index} ended, with {ending(process)}, and the directory of its socket is gone"
                return f"{told}: {directory}; let nothing remove it, or set another TMPDIR, and restart the server", 1
        return None

    def _count_restarts(self) -> None:
        for index, process in enumerate(getattr(self._host, "inference_workers", [])):
            if self._workers.setdefault(index, process) is not process:
                self._workers[index] = process
                self._metrics.worker_restarted()

    def _greet_workers(self) -> None:
        for index, path in enumerate(self._sockets):
            if index not in self._ready:
                with contextlib.suppress(OSError):
                    self._ready[index] = greet(path)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(self._address, timeout=1):
            return True
        return False


def refuse_connections(port: int) -> None:
    """Shut down the shared listening socket, whose backlog the kernel would fill until the last process ends."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the directory's own descriptor, closed by now
            if not stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as listener:
                is_inet = listener.family in (socket.AF_INET, socket.AF_INET6)
                is_listening = is_inet and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if is_listening and listener.getsockname()[1] == port:
                    listener.shutdown(socket.SHUT_RDWR)


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


def lost(what: str) -> str:
    """Say that a process which nobody restarts has ended."""
    return f"{what} ended unexpectedly; the server stops, so that it can be started anew"
