"""A worker process: one engine behind one Unix socket, run as LitServe's loop.

LitServe starts the process and restarts it; requests and results bypass its queues. The socket exists from the moment
the engine is warm, so a connection is the proof of readiness. One thread reads, batches, computes and writes in turn.
"""

import multiprocessing.util
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import litserve as ls
import orjson
from litserve.loops.base import LitLoop
from setproctitle import setproctitle

from models.errors import MLPError, OutOfMemoryError
from service import logs
from service.batcher import Batcher, Waiting
from service.errors import DeadlineExceededError, code_of, message_of, without_paths
from service.heap import freeze_heap
from service.patience import Patience
from service.polling import Streak
from service.surroundings import ModelIdentity, identify
from service.watch import START_FAILED, unblock_signals
from service.wire import Decoder, Frame, Kind, header

RECEIVE_BYTES = 1 << 20
HOLD_STEP_S = 50e-6  # epoll's own timeout counts in milliseconds
REST_OF_FRAME_NS = 1_000_000
SILENT = "6"  # of Kineto's levels, which tells each profile's start and end on stderr otherwise

Profiling = Generator[None, None, dict[str, object]]
"""A profile in the making: a forward pass a step; what it returns is JSON's."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker is told; it travels to the new process."""

    model: Path
    identity: ModelIdentity
    dtype: str
    threads: int
    backends: tuple[str, ...]
    default_backend: str
    max_batch_rows: int
    spin_us: int
    hold_share: float
    log_format: str
    socket_directory: Path

    def socket(self, worker_id: int) -> Path:
        """Return where a worker listens."""
        return self.socket_directory / f"worker-{worker_id}.sock"


class EngineAPI(ls.LitAPI):  # type: ignore[misc]
    """What LitServe runs in each worker."""

    def __init__(self, plan: WorkerPlan) -> None:
        super().__init__(loop=EngineLoop(), api_path="/predict")
        self.plan = plan

    def setup(self, device: str) -> None:
        """Load the engine; what prevents it ends the process with one line on stderr."""
        from kernels.progress import Progress
        from models.engine import load_engine

        setproctitle("fused-mlp-server: worker")
        os.environ.setdefault("KINETO_LOG_LEVEL", SILENT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent says when to stop
        unblock_signals()
        plan = self.plan
        logs.configure(plan.log_format, is_request_logged=False)
        try:
            if identify(plan.model) != plan.identity:
                fail(f"model {plan.model}: changed since the server started; start it anew to serve what is there now")
            with Progress("loading the model") as progress:
                self.engine = load_engine(plan.model, device, plan.dtype, plan.backends, plan.threads, progress)
        except MLPError as error:
            fail(str(error))
        except Exception as error:
            fail(f"model {plan.model}: could not be loaded on {device}: {first_line(error)}")

    def predict(self, x: Any, **kwargs: Any) -> Any:
        """Run rows through the engine: `predict(rows, backend=...)`."""
        return self.engine.run(x, kwargs["backend"])

    def profile(self, rows: int, backend: str, trace: Path) -> "Profiling":
        """Profile forward passes, one a step, and write a trace."""
        from models.profile import profile_in_steps

        found = yield from profile_in_steps(self.engine, rows, backend, trace)
        return found.to_dict()


class EngineLoop(LitLoop):  # type: ignore[misc]
    """Warms the engine, then serves its socket until the parent or a signal ends it."""

    def __call__(
        self,
        lit_api: EngineAPI,
        device: str,
        worker_id: int,
        request_queue: Any,  # noqa: ARG002
        transport: Any,  # noqa: ARG002
        workers_setup_status: Any,  # noqa: ARG002
        callback_runner: Any,  # noqa: ARG002
    ) -> None:
        """Run until no request can come any more."""
        from kernels.progress import Progress

        plan = lit_api.plan
        engine = lit_api.engine
        if worker_id == 0:  # the others do the same at the same time
            with Progress("warming up", patience_s=0.0) as progress:
                engine.warm_up(plan.max_batch_rows, lambda name, done, total: progress(done, total, name))
        else:
            engine.warm_up(plan.max_batch_rows)
        wanted = [name for name in plan.backends if plan.default_backend in ("auto", name)]
        if all(engine.backends[name].state == "unavailable" for name in wanted):
            fail("; ".join(f"backend {name!r} is unavailable: {engine.backends[name].reason}" for name in wanted))
        hello = {
            "device": device,
            "dtype": plan.dtype,
            "threads": engine.threads,
            "parameters": engine.parameter_count,
            "backends": {name: asdict(status) for name, status in engine.backends.items()},
        }
        freeze_heap()
        with listen(plan.socket(worker_id)) as listener:
            WorkerServer(
                listener,
                lit_api.predict,
                plan.backends,
                plan.max_batch_rows,
                orjson.dumps(hello),
                plan.spin_us,
                plan.hold_share,
                lit_api.profile,
            ).run()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]  # gives its semaphores back
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # nothing is left to tidy, and torch takes seconds to do so


def fail(message: str) -> None:
    """End this process before it serves, with one line; the parent reads no more than the exit status."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(START_FAILED)


def first_line(error: BaseException) -> str:
    """Return an exception's kind and the first line of what it says."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def listen(path: Path) -> socket.socket:
    """Listen on a Unix socket, in place of one that an ended worker left."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    return listener


class Client:
    """One API process: its socket, what it has sent and what it is still owed."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.decoder = Decoder()
        self.outgoing: deque[bytes | memoryview] = deque()


@dataclass(frozen=True, slots=True, eq=False)
class ProfileJob:
    """A profile that somebody waits for; `deadline_ns` is of CLOCK_MONOTONIC."""

    client: Client
    request_id: int
    deadline_ns: int
    steps: Profiling


class Asked(Protocol):
    """What is answered: an inference request or a profile."""

    @property
    def client(self) -> Client:
        """Who asked."""

    @property
    def request_id(self) -> int:
        """The caller's number for it."""


class WorkerServer:
    """Reads requests from API processes, computes batches, writes results.

    A profile goes on by one forward pass a turn, after the batch of that turn, so that no batch waits for more. A
    shadow is computed, alone, in a turn that has nothing else to do.
    """

    def __init__(
        self,
        listener: socket.socket,
        run: Callable[..., Any],
        backends: tuple[str, ...],
        max_batch_rows: int,
        hello: bytes,
        spin_us: int = 0,
        hold_share: float = 0.0,
        profile: Callable[[int, str, Path], Profiling] | None = None,
    ) -> None:
        """`run(rows, backend=name)` takes and gives a tensor; `hello` is each connection's first frame.

        `profile(rows, name, trace)` profiles so many rows in steps.
        """
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # received bytes, which nobody writes to
        self._spin_ns = spin_us * 1000
        self._streak = Streak()
        self.patience = Patience(len(backends), hold_share)
        self._held_until_ns = 0
        self._listener = listener
        self._run = run
        self._backends = backends
        self._batcher: Batcher[Client] = Batcher(len(backends), max_batch_rows)
        self._profile = profile
        self._jobs: deque[ProfileJob] = deque()
        self._shadows: deque[Waiting[Client]] = deque()
        self._hello = hello
        self._clients: set[Client] = set()
        self._selector = selectors.DefaultSelector()
        self._is_stopping = False

    def run(self) -> None:
        """Serve until a signal or the parent's end, and then until the last API process has its answers."""
        wake_reader, wake_writer = socket.socketpair()
        wake_reader.setblocking(False)
        wake_writer.setblocking(False)
        signal.set_wakeup_fd(wake_writer.fileno())
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        self.watch_listener()
        self._selector.register(wake_reader, selectors.EVENT_READ, lambda _: wake_reader.recv(4096))
        parent = multiprocessing.parent_process()
        if parent:
            self._selector.register(parent.sentinel, selectors.EVENT_READ, lambda _: self._lose_parent(parent.sentinel))
        while self._clients or len(self._batcher) or not self._is_stopping:
            self.turn()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself from here
        signal.set_wakeup_fd(-1)

    def watch_listener(self) -> None:
        """Accept connections from now on."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """End all connections."""
        for client in list(self._clients):
            self._drop(client)
        self._selector.close()

    def turn(self) -> None:
        """Take what has come, waiting for something if nothing waits, and compute one batch, profile one pass."""
        ready = self._wait()
        for key, events in ready:
            key.data(events)
        self._finish_frames()
        first = self._batcher.first
        if first is not None and not self._is_stopping:
            self._held_until_ns = self.patience.until_ns(first.backend, self._batcher.rows(first.backend))
            if time.monotonic_ns() < self._held_until_ns:
                return
        is_idle = not ready and first is None
        self._compute_next()
        if self._jobs:
            self._profile_next()
        elif is_idle and self._shadows:
            self._compute_shadow()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready: at once if requests wait, else after a sleep; before that, look for a lone caller's."""
        ready = self._selector.select(0)
        if ready:
            return ready
        if len(self._batcher):
            return self._hold()
        if self._jobs or self._shadows:
            return ready
        if not self._streak.is_long:
            return self._selector.select(None)
        limit_ns = time.monotonic_ns() + self._spin_ns
        while not ready and time.monotonic_ns() < limit_ns:
            os.sched_yield()
            ready = self._selector.select(0)
        return ready or self._selector.select(None)

    def _finish_frames(self) -> None:
        """Read and write on while a frame is on its way.

        A socket's buffer holds but a few large requests: a batch should be more than those, and answers should not wait
        for the next batch to be computed.
        """
        limit_ns = time.monotonic_ns() + REST_OF_FRAME_NS
        while self.is_amid_frames:
            ready = self._selector.select(0)
            for key, events in ready:
                key.data(events)
            now_ns = time.monotonic_ns()
            if ready:
                limit_ns = now_ns + REST_OF_FRAME_NS
            elif now_ns > limit_ns:  # a process that was stopped, or is slow; others are not kept waiting for it
                break
            else:
                os.sched_yield()

    @property
    def is_amid_frames(self) -> bool:
        """Whether part of a frame is still to be read or written."""
        if any(client.outgoing for client in self._clients):
            return True
        return any(client.decoder.is_in_frame for client in self._clients) and not self._batcher.is_full

    def _hold(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Give others the time to join what waits; return what comes, or nothing once the time is up."""
        ready: list[tuple[selectors.SelectorKey, int]] = []
        while not ready and time.monotonic_ns() < self._held_until_ns:
            time.sleep(HOLD_STEP_S)
            ready = self._selector.select(0)
        return ready

    def _stop(self) -> None:
        self._is_stopping = True

    def _lose_parent(self, sentinel: int) -> None:
        self._selector.unregister(sentinel)
        self._stop()

    def _accept(self, _events: int) -> None:
        self.adopt(self._listener.accept()[0])

    def adopt(self, connection: socket.socket) -> None:
        """Serve one more connection."""
        connection.setblocking(False)
        client = Client(connection)
        self._clients.add(client)
        self._selector.register(connection, selectors.EVENT_READ, lambda events: self._serve(client, events))
        self._send(client, header(Kind.HELLO, 0, len(self._hello)) + self._hello)

    def _serve(self, client: Client, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(client)
        if not events & selectors.EVENT_READ or client not in self._clients:
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
        for frame in client.decoder.feed(data):
            if frame.kind == Kind.INFER:
                request = Waiting(
                    client, frame.request_id, frame.backend, frame.rows, frame.payload, frame.start_ns, frame.end_ns
                )
                self._batcher.add(request)
                self.patience.note_arrival(frame.start_ns)
            elif frame.kind == Kind.SHADOW:
                shadow = Waiting(
                    client, frame.request_id, frame.backend, frame.rows, frame.payload, frame.start_ns, frame.end_ns
                )
                self._shadows.append(shadow)
            elif frame.kind == Kind.PROFILE:
                self._add_profile(client, frame)
            elif self._batcher.cancel(client, frame.request_id) or self._give_up_profile(client, frame.request_id):
                self._send(client, header(Kind.CANCELLED, frame.request_id, 0))  # else its result is on the way

    def _drop(self, client: Client) -> None:
        self._clients.discard(client)
        self._batcher.drop(client)
        for job in [job for job in self._jobs if job.client is client]:
            self._jobs.remove(job)
        self._shadows = deque(shadow for shadow in self._shadows if shadow.client is not client)
        self._selector.unregister(client.socket)
        client.socket.close()

    def _add_profile(self, client: Client, frame: Frame) -> None:
        assert self._profile is not None  # noqa: S101
        trace = Path(str(frame.payload, "utf-8"))
        steps = self._profile(frame.rows, self._backends[frame.backend], trace)
        self._jobs.append(ProfileJob(client, frame.request_id, frame.end_ns, steps))

    def _give_up_profile(self, client: Client, request_id: int) -> bool:
        for job in self._jobs:
            if job.client is client and job.request_id == request_id:
                self._jobs.remove(job)
                return True
        return False

    def _compute_shadow(self) -> None:
        shadow = self._shadows.popleft()
        now_ns = time.monotonic_ns()
        try:
            if shadow.deadline_ns <= now_ns:
                raise DeadlineExceededError("there was always something else to do")
            result = self._timed_run([shadow])
        except Exception as error:
            self._send_error(shadow, error)
        else:
            self._send_results([shadow], now_ns, *result)

    def _profile_next(self) -> None:
        """Take the oldest profile one step further; answer it at its end."""
        job = self._jobs[0]
        try:
            if job.deadline_ns <= time.monotonic_ns():
                raise DeadlineExceededError("the deadline passed before the profile was done; ask for fewer rows")
            next(job.steps)
        except StopIteration as end:
            self._jobs.popleft()
            payload = orjson.dumps(end.value)
            self._send(job.client, header(Kind.PROFILED, job.request_id, len(payload)) + payload)
        except Exception as error:
            self._jobs.popleft()
            self._send_error(job, error)

    def _compute_next(self) -> None:
        taken_ns = time.monotonic_ns()
        batch, expired = self._batcher.take(taken_ns)
        late = DeadlineExceededError("the deadline passed while the request waited for its batch")
        for request in expired:
            self._send_error(request, late)
        if batch:
            self._streak.add(len(batch) == 1)
            self._compute(batch, taken_ns)

    def _compute(self, batch: list[Waiting[Client]], taken_ns: int) -> None:
        try:
            result = self._timed_run(batch)
        except Exception as error:
            if len(batch) == 1:
                self._send_error(batch[0], error)
                return
            # So that a request at fault fails alone, and that what is too much at once may still fit in parts.
            parts = 2 if isinstance(error, OutOfMemoryError) else len(batch)
            size = -(-len(batch) // parts)
            for start in range(0, len(batch), size):
                self._compute(batch[start : start + size], taken_ns)
        else:
            rows = self._send_results(batch, taken_ns, *result)
            self.patience.note_answers(batch[0].backend, len(batch), rows, result[1], time.monotonic_ns())

    def _timed_run(self, batch: list[Waiting[Client]]) -> tuple[int, int, memoryview]:
        import torch

        payloads = [request.payload for request in batch]
        data = payloads[0] if len(batch) == 1 else bytearray().join(payloads)
        rows = torch.frombuffer(data, dtype=torch.float32).view(sum(request.rows for request in batch), -1)
        start_ns = time.monotonic_ns()
        result = self._run(rows, backend=self._backends[batch[0].backend])
        outputs = result.to(device="cpu", dtype=torch.float32).contiguous().numpy()
        return start_ns, time.monotonic_ns() - start_ns, memoryview(outputs).cast("B")

    def _send_results(
        self, batch: list[Waiting[Client]], taken_ns: int, start_ns: int, took_ns: int, outputs: memoryview
    ) -> int:
        """Send each its own, and return the rows of all."""
        batch_rows = sum(request.rows for request in batch)
        batch_ns = start_ns - taken_ns
        row_bytes = len(outputs) // batch_rows
        owed: defaultdict[Client, list[bytes | memoryview]] = defaultdict(list)
        at = 0
        for request in batch:
            size = request.rows * row_bytes
            waited_ns = max(0, taken_ns - request.accepted_ns)
            head = header(
                Kind.RESULT,
                request.request_id,
                size,
                request.backend,
                request.rows,
                waited_ns,
                took_ns,
                batch_rows,
                batch_ns,
            )
            owed[request.client] += (head, outputs[at : at + size])
            at += size
        for client, parts in owed.items():
            self._send(client, b"".join(parts))
        return batch_rows

    def _send_error(self, request: Asked, error: BaseException) -> None:
        code = code_of(error)
        # The front logs the former, and tells less.
        message = first_line(error) if code == "internal" else without_paths(message_of(error))
        payload = f"{code}\n{message}".encode()
        self._send(request.client, header(Kind.ERROR, request.request_id, len(payload)) + payload)

    def _send(self, client: Client, data: bytes) -> None:
        if client not in self._clients:
            return
        client.outgoing.append(data)
        self._flush(client)

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
