"""A worker's loop: what its callers send is batched, computed and answered.

One thread reads, batches, computes and writes in turn. `service.worker_process` starts it in a process of its own.
"""

import multiprocessing
import os
import selectors
import signal
import socket
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import orjson

from models.errors import DeviceLostError, MLPError, OutOfMemoryError, first_line
from service.batcher import Batcher, Waiting
from service.errors import DeadlineExceededError, code_of, message_of, without_paths
from service.flights import Flights
from service.hold import Hold
from service.listener import Client, Listener
from service.polling import Streak
from service.wire import Frame, Kind, header

if TYPE_CHECKING:
    from models.staging import Staging

HOLD_STEP_S = 50e-6  # epoll's own timeout counts in milliseconds
REST_OF_FRAME_NS = 1_000_000

Profiling = Generator[None, None, dict[str, object]]
"""A profile in the making: a forward pass a step; what it returns is JSON's."""


@dataclass(frozen=True, slots=True, eq=False)
class ProfileJob:
    """A profile that somebody waits for; `deadline_ns` is by CLOCK_MONOTONIC."""

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


AnyAsked = TypeVar("AnyAsked", bound=Asked)


class WorkerServer:
    """Reads requests from API processes, computes batches, writes results.

    A profile advances by one forward pass per turn, after that turn's batch, so that no batch waits for more. A shadow
    is computed by itself, up to a batch's rows at a time, in a turn that has nothing else to do. If batches go through
    a `Staging`, a turn hands one over and answers another, and neither a pass nor a shadow runs while any is in the
    air.
    """

    def __init__(
        self,
        listening: socket.socket,
        run: Callable[..., Any],
        backends: tuple[str, ...],
        max_batch_rows: int,
        hello: bytes,
        spin_us: int = 0,
        hold_share: float = 0.0,
        profile: Callable[[int, str, Path], Profiling] | None = None,
        staging: "Staging | None" = None,
        bound_memory: Callable[[], None] = lambda: None,
    ) -> None:
        """`run(rows, backend=name)` takes and gives a tensor; `hello` is each connection's first frame.

        `profile(rows, name, trace)` profiles so many rows in steps. With `staging`, batches go through it.
        `bound_memory` is called after each turn that may have computed something.
        """
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # received bytes, which nobody writes to
        self._spin_ns = spin_us * 1000
        self._streak = Streak()
        self.hold = Hold(len(backends), hold_share)
        self._held_until_ns = 0
        self.listener = Listener(listening, hello, self._take, self._forget)
        self._select = self.listener.select
        self._run = run
        self._backends = backends
        self._max_batch_rows = max_batch_rows
        self._batcher: Batcher[Client] = Batcher(len(backends), max_batch_rows)
        self._flights = (
            Flights(staging, backends, self._answer, self._compute_in_parts) if staging is not None else None
        )
        self._staging = staging
        self._bound_memory = bound_memory
        self._profile = profile
        self._jobs: deque[ProfileJob] = deque()
        self._shadows: deque[Waiting[Client]] = deque()
        self._is_stopping = False

    def run(self) -> None:
        """Serve until a signal or the parent's end, and then until the last API process has its answers.

        Raises:
            DeviceLostError: as `turn`.
        """
        wake_reader, wake_writer = socket.socketpair()
        wake_reader.setblocking(False)
        wake_writer.setblocking(False)
        signal.set_wakeup_fd(wake_writer.fileno())
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        self.listener.open()
        self.listener.watch(wake_reader, lambda _: wake_reader.recv(4096))
        parent = multiprocessing.parent_process()
        if parent:
            self.listener.watch(parent.sentinel, lambda _: self._lose_parent(parent.sentinel))
        while self.listener.clients or len(self._batcher) or not self._is_stopping:
            self.turn()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself from here
        signal.set_wakeup_fd(-1)

    def turn(self) -> None:
        """Take what has come, waiting for something if nothing waits, and compute one batch, profile one pass.

        Raises:
            DeviceLostError: nothing can be computed here any more; what is in flight stays unanswered.
        """
        ready = self._wait()
        for key, events in ready:
            key.data(events)
        self._finish_frames()
        is_flying = bool(self._flights)
        if self._flights:
            self._flights.land()
            if not self._flights.may_begin(self._batcher.is_next_full):
                return
        first = self._batcher.first
        if first is not None and not self._is_stopping:
            rows = self._batcher.rows(first.backend)
            is_full = rows >= self._max_batch_rows
            self._held_until_ns = 0 if is_full else self.hold.until_ns(first.backend, rows)
            if time.monotonic_ns() < self._held_until_ns:
                return
        is_idle = not ready and first is None and not is_flying
        self._compute_next()
        if self._jobs:
            if self._flights:
                self._flights.land_all()
            self._profile_next()
        elif is_idle and self._shadows:
            self._compute_shadow()
        self._bound_memory()

    def _wait(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready: at once if requests wait, else after a sleep, with polling for a lone caller first."""
        ready = self._select(0)
        if ready:
            return ready
        if self._flights:
            os.sched_yield()
            return ready
        if len(self._batcher):
            return self._hold()
        if self._jobs or self._shadows:
            return ready
        if not self._streak.is_long:
            return self._select(None)
        limit_ns = time.monotonic_ns() + self._spin_ns
        while not ready and time.monotonic_ns() < limit_ns:
            os.sched_yield()
            ready = self._select(0)
        return ready or self._select(None)

    def _finish_frames(self) -> None:
        """Read and write on while a frame is on its way.

        A socket's buffer holds only a few large requests; a batch should not be limited to those, and answers should
        not wait until the next batch is computed.
        """
        limit_ns = time.monotonic_ns() + REST_OF_FRAME_NS
        while self.is_amid_frames and not (self._flights and self._flights.is_due):
            ready = self._select(0)
            for key, events in ready:
                key.data(events)
            now_ns = time.monotonic_ns()
            if ready:
                limit_ns = now_ns + REST_OF_FRAME_NS
            elif now_ns > limit_ns:  # its process was stopped, or is slow; others are not kept waiting for it
                break
            else:
                os.sched_yield()

    @property
    def is_amid_frames(self) -> bool:
        """Whether part of a frame is still to be read or written."""
        return self.listener.is_writing or (self.listener.is_reading and not self._batcher.is_full)

    def _hold(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Give others the time to join what waits; return what comes, or nothing once the time is up."""
        ready: list[tuple[selectors.SelectorKey, int]] = []
        while not ready and time.monotonic_ns() < self._held_until_ns:
            time.sleep(HOLD_STEP_S)
            ready = self._select(0)
        return ready

    def _stop(self) -> None:
        self._is_stopping = True

    def _lose_parent(self, sentinel: int) -> None:
        self.listener.ignore(sentinel)
        self._stop()

    def _take(self, client: Client, frames: list[Frame]) -> None:
        for frame in frames:
            if frame.kind in (Kind.INFER, Kind.SHADOW):
                request = Waiting(
                    client, frame.request_id, frame.backend, frame.rows, frame.payload, frame.start_ns, frame.end_ns
                )
                if frame.kind == Kind.SHADOW:
                    self._shadows.append(request)
                else:
                    self._batcher.add(request)
                    self.hold.note_arrival(frame.start_ns)
            elif frame.kind == Kind.PROFILE:
                self._add_profile(client, frame)
            elif self._cancel(client, frame.request_id):
                self.listener.send(client, header(Kind.CANCELLED, frame.request_id, 0))  # else its result is on the way

    def _forget(self, client: Client) -> None:
        self._batcher.drop(client)
        for job in [job for job in self._jobs if job.client is client]:
            self._jobs.remove(job)
        self._shadows = deque(shadow for shadow in self._shadows if shadow.client is not client)

    def _add_profile(self, client: Client, frame: Frame) -> None:
        assert self._profile is not None  # noqa: S101
        trace = Path(str(frame.payload, "utf-8"))
        steps = self._profile(frame.rows, self._backends[frame.backend], trace)
        self._jobs.append(ProfileJob(client, frame.request_id, frame.end_ns, steps))

    def _cancel(self, client: Client, request_id: int) -> bool:
        return (
            self._batcher.cancel(client, request_id)
            or _removed(self._jobs, client, request_id)
            or _removed(self._shadows, client, request_id)
        )

    def _compute_shadow(self) -> None:
        shadow = self._shadows.popleft()
        if shadow.rows > self._max_batch_rows:
            shadow, rest = shadow.cut(self._max_batch_rows)
            self._shadows.appendleft(rest)
        now_ns = time.monotonic_ns()
        try:
            if shadow.deadline_ns <= now_ns:
                raise DeadlineExceededError("there was always something else to do")
            result = self._timed_run([shadow])
        except Exception as error:
            self._check_device(error)
            self._fail(shadow, error)
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
            self.listener.send(job.client, header(Kind.PROFILED, job.request_id, len(payload)) + payload)
        except Exception as error:
            self._check_device(error)
            self._jobs.popleft()
            self._send_error(job, error)

    def _compute_next(self) -> None:
        taken_ns = time.monotonic_ns()
        batch, expired = self._batcher.take(taken_ns)
        late = DeadlineExceededError("the deadline passed while the request waited for its batch")
        for request in expired:
            self._fail(request, late)
        if batch:
            self._streak.add(len(batch) == 1)
            self._compute(batch, taken_ns)

    def _compute(self, batch: list[Waiting[Client]], taken_ns: int) -> None:
        try:
            if self._flights is not None:
                self._flights.begin(batch, taken_ns)
                return
            result = self._timed_run(batch)
        except DeviceLostError:
            raise
        except Exception as error:
            self._compute_in_parts(batch, taken_ns, error)
        else:
            self._answer(batch, taken_ns, *result)

    def _compute_in_parts(self, batch: list[Waiting[Client]], taken_ns: int, error: Exception) -> None:
        """Compute a failed batch in parts, so that only a request at fault fails, and parts may fit in memory."""
        self._check_device(error)
        if len(batch) == 1:
            self._fail(batch[0], error)
            return
        parts = 2 if isinstance(error, OutOfMemoryError) else len(batch)
        size = -(-len(batch) // parts)
        for start in range(0, len(batch), size):
            self._compute(batch[start : start + size], taken_ns)

    def _check_device(self, error: Exception) -> None:
        """Raise DeviceLostError if `error` is the first of a device that fails every call from now on."""
        if self._staging is not None and not isinstance(error, MLPError):
            self._staging.check(error)

    def _answer(
        self, batch: list[Waiting[Client]], taken_ns: int, start_ns: int, took_ns: int, outputs: memoryview
    ) -> None:
        answered = self._send_results(batch, taken_ns, start_ns, took_ns, outputs)
        rows = sum(request.rows for request in batch)
        self.hold.note_answers(batch[0].backend, answered, rows, took_ns, time.monotonic_ns())

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
        """Send each request its results, or keep them if more batches of it follow; return how many are answered."""
        batch_rows = sum(request.rows for request in batch)
        batch_ns = start_ns - taken_ns
        row_bytes = len(outputs) // batch_rows
        owed: defaultdict[Client, list[bytes | memoryview]] = defaultdict(list)
        at = answered = 0
        for request in batch:
            size = request.rows * row_bytes
            results = outputs[at : at + size]
            at += size
            times = (max(0, taken_ns - request.accepted_ns), took_ns, batch_rows, batch_ns)
            whole = request.assembly
            if whole is not None:
                if whole.is_over:
                    continue
                whole.add(results, taken_ns, start_ns, took_ns, batch_rows)
                if not request.is_last:
                    continue
                results, size = memoryview(whole.outputs), len(whole.outputs)
                times = (whole.waited_ns, whole.took_ns, whole.batch_rows, whole.batch_ns)
            head = header(Kind.RESULT, request.request_id, size, request.backend, size // row_bytes, *times)
            owed[request.client] += (head, results)
            answered += 1
        for client, parts in owed.items():
            self.listener.send(client, b"".join(parts))
        return answered

    def _fail(self, request: Waiting[Client], error: BaseException) -> None:
        """Answer a request with an error, once, and compute no more of it."""
        if request.assembly is not None:
            if request.assembly.is_over:
                return
            request.assembly.is_over = True
            self._cancel(request.client, request.request_id)
        self._send_error(request, error)

    def _send_error(self, request: Asked, error: BaseException) -> None:
        code = code_of(error)
        # The front logs the former, and tells less.
        message = first_line(error) if code == "internal" else without_paths(message_of(error))
        payload = f"{code}\n{message}".encode()
        self.listener.send(request.client, header(Kind.ERROR, request.request_id, len(payload)) + payload)


def _removed(queue: deque[AnyAsked], client: Client, request_id: int) -> bool:
    for asked in queue:
        if asked.client is client and asked.request_id == request_id:
            queue.remove(asked)
            return True
    return False
