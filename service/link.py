"""One connection to one worker: frames out, results in, a callback per request."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import orjson

from service.admission import Admission
from service.errors import DeadlineExceededError, RemoteError, WorkerLostError, without_paths
from service.schemas import BackendState, Rows
from service.wire import Decoder, Frame, Kind, header

FRAMES_PER_WRITE = 8  # the worker starts on the first of many while the rest are still being read
NEVER_NS = 1 << 63
log = logging.getLogger(__name__)


class Result(NamedTuple):
    """The result of one request; times in nanoseconds."""

    rows: Rows  # (n, width_out)
    backend: str
    implementation: str
    queue_ns: int  # from acceptance until its batch was taken
    batch_ns: int  # from there until the batch computed: being put together, and what was tried before
    compute_ns: int
    batch_rows: int  # where it took several batches, of the largest, and the times are their sums


Deliver = Callable[[Result | Exception], None]
"""Takes a request's outcome, once, on the event loop."""

DeliverProfile = Callable[[bytes | Exception], None]
"""Takes a profile as the JSON that the worker wrote, likewise."""


@dataclass(slots=True)
class _Pending:
    kind: Kind  # INFER, SHADOW or PROFILE
    deliver: Callable[[Any], None] | None  # None once the caller has its outcome, or is gone
    rows: int
    deadline_ns: int
    timeout_s: float


class WorkerLink(asyncio.Protocol):
    """One connection to one worker; counts as up from the worker's first frame to the connection's end."""

    def __init__(
        self,
        name: str,
        backends: tuple[str, ...],
        on_change: Callable[[], None],
        on_load: Callable[[], None],
        timeout_s: float,
        admission: Admission,
    ) -> None:
        """`backends` are the server's, in wire order; `on_load` is called when requests have come or gone.

        A worker that holds requests and answers none for `timeout_s` is logged. `admission` says how much of a request
        counts in `counted`, and learns how long results took.
        """
        self.name = name
        self._names = backends
        self._on_change = on_change
        self._on_load = on_load
        self.backends: dict[str, BackendState] = {}
        self.is_up = False
        self._timeout_ns = int(timeout_s * 1e9)
        self._quiet_since_ns = 0  # its last answer, or when it got something to answer, whichever is later
        self._is_silent = False  # and logged as that
        self.rows = 0  # sent and not yet answered by the worker, whatever became of the caller
        self.counted = 0  # rows that count towards the queue's bound
        self._admission = admission
        self._counted_rows = admission.counted_rows
        self.shadows = 0  # shadows sent and not yet answered
        self.unanswered = 0  # inference requests whose caller waits: a hung worker holds others too
        self.profiles = 0  # whose caller waits
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._pending: dict[int, _Pending] = {}
        self._ids = itertools.count(1)
        self._decoder = Decoder()
        self._outgoing: list[bytes | memoryview] = []
        self._is_flush_due = False
        self._transport: asyncio.Transport | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_ns = NEVER_NS

    @property
    def requests(self) -> int:
        """Requests sent and not yet answered by the worker, shadows aside."""
        return len(self._pending) - self.shadows

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not derive from asyncio's

    def send(self, rows: Rows, backend: int, accepted_ns: int, timeout_s: float, deliver: Deliver) -> int:
        """Queue rows for the worker, writing those of one loop turn in two writes; return the request's number."""
        request_id = next(self._ids)
        deadline_ns = accepted_ns + int(timeout_s * 1e9)
        count = len(rows)
        payload = rows.data.cast("B")
        head = header(Kind.INFER, request_id, len(payload), backend, count, accepted_ns, deadline_ns)
        self._send(head, payload)
        self._await(request_id, _Pending(Kind.INFER, deliver, count, deadline_ns, timeout_s))
        self.rows += count
        self.counted += min(count, self._counted_rows)
        return request_id

    def profile(self, rows: int, backend: int, trace: Path, timeout_s: float, deliver: DeliverProfile) -> int:
        """Ask the worker for a profile; return the request's number. Its rows do not count as queued."""
        return self._ask(Kind.PROFILE, str(trace).encode(), backend, rows, timeout_s, deliver)

    def shadow(self, rows: Rows, backend: int, timeout_s: float, deliver: Deliver) -> None:
        """Have rows computed when the worker has nothing else to do; they do not count as queued.

        A shadow whose time is up is cancelled, and held until the worker says that it has dropped it.
        """
        self._ask(Kind.SHADOW, rows.data.cast("B"), backend, len(rows), timeout_s, deliver)
        self.shadows += 1

    def _ask(
        self,
        kind: Kind,
        payload: bytes | memoryview,
        backend: int,
        rows: int,
        timeout_s: float,
        deliver: Callable[[Any], None],
    ) -> int:
        request_id = next(self._ids)
        now_ns = time.monotonic_ns()
        deadline_ns = now_ns + int(timeout_s * 1e9)
        self._send(header(kind, request_id, len(payload), backend, rows, now_ns, deadline_ns), payload)
        self._await(request_id, _Pending(kind, deliver, 0, deadline_ns, timeout_s))
        return request_id

    def _await(self, request_id: int, pending: _Pending) -> None:
        if not self._pending:
            self._quiet_since_ns = time.monotonic_ns()
        self._pending[request_id] = pending
        self._count(pending, 1)
        if pending.deadline_ns < self._alarm_ns:
            self._set_alarm(pending.deadline_ns)

    def _count(self, pending: _Pending, by: int) -> None:
        """Count a request whose caller waits, by 1, or waits no more, by -1; no caller waits for a shadow."""
        if pending.kind == Kind.INFER:
            self.unanswered += by
        elif pending.kind == Kind.PROFILE:
            self.profiles += by

    def abandon(self, request_id: int) -> bool:
        """Forget a request whose caller is gone, and tell the worker not to compute it if it still waits there.

        Returns:
            Whether the request was still unanswered.
        """
        pending = self._pending.get(request_id)
        if pending is None or pending.deliver is None:
            return False
        pending.deliver = None
        self._count(pending, -1)
        self._send(header(Kind.CANCEL, request_id, 0))
        self._on_load()
        return True

    def fail_all(self, error: Exception) -> None:
        """Answer everything in flight with an error; late results are dropped on arrival."""
        for pending in self._pending.values():
            self._settle(pending, error)
        self._on_load()

    def _settle(self, pending: _Pending, outcome: Result | bytes | Exception) -> None:
        """Deliver an outcome, unless that has happened; a delivery that fails does not affect the others."""
        if pending.deliver is not None:
            deliver, pending.deliver = pending.deliver, None
            self._count(pending, -1)
            try:
                deliver(outcome)
            except Exception:
                log.exception("an outcome could not be delivered")

    def _send(self, *parts: bytes | memoryview) -> None:
        self._outgoing += parts
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)
            if not self.rows:  # an idle worker starts at once; for a busy one, those of a turn are put together
                self._write()
        elif len(self._outgoing) >= 2 * FRAMES_PER_WRITE:
            self._write()

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._outgoing:
            self._write()
        self._on_load()

    def _write(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport and not self._transport.is_closing():
            self._transport.writelines(outgoing)

    def _set_alarm(self, deadline_ns: int) -> None:
        """Wake at the nearest deadline: one timer, seldom moved, for all requests."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_ns = deadline_ns
        delay_s = max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)
        self._alarm = self._loop.call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self._alarm, self._alarm_ns = None, NEVER_NS
        now_ns = time.monotonic_ns()
        for request_id, pending in self._pending.items():
            if pending.deliver is not None and pending.deadline_ns <= now_ns:
                if pending.kind == Kind.SHADOW:  # a worker looks at shadows when it is idle, which may be never
                    self._send(header(Kind.CANCEL, request_id, 0))
                late = f"no result within {pending.timeout_s * 1e3:g} ms; ask for fewer rows or a longer timeout"
                self._settle(pending, DeadlineExceededError(late))
        deadlines = [each.deadline_ns for each in self._pending.values() if each.deliver is not None]
        if self._pending and not self._is_silent:
            silent_ns = self._quiet_since_ns + self._timeout_ns
            if silent_ns <= now_ns:
                self._is_silent = True
                log.error(
                    "%s: no answer for %g s while it holds %d requests; see whether its process is stopped or hangs",
                    self.name,
                    self._timeout_ns / 1e9,
                    len(self._pending),
                )
            else:
                deadlines.append(silent_ns)
        if deadlines:
            self._set_alarm(min(deadlines))
        self._on_load()

    def data_received(self, data: bytes) -> None:
        """Deliver the results that are now complete."""
        now_ns = time.monotonic_ns()
        if self._is_silent:
            self._is_silent = False
            log.warning("%s: answers again, after %.3g s", self.name, (now_ns - self._quiet_since_ns) / 1e9)
        self._quiet_since_ns = now_ns
        for frame in self._decoder.feed(data):
            if frame.kind == Kind.HELLO:
                states = orjson.loads(frame.payload)["backends"]
                self.backends = {
                    name: without_host_paths(BackendState.model_validate(state)) for name, state in states.items()
                }
                self.is_up = True
                self._on_change()
                continue
            pending = self._pending.pop(frame.request_id, None)
            if pending is None:
                log.error("%s: a result for a request that is not in flight", self.name)
                continue
            self.rows -= pending.rows
            self.counted -= min(pending.rows, self._counted_rows)
            self.shadows -= pending.kind == Kind.SHADOW
            if frame.kind == Kind.RESULT and pending.kind == Kind.INFER:
                self._admission.learn(frame.rows, frame.batch_rows, frame.compute_ns)
            if pending.deliver is not None:
                self._settle(pending, self._outcome(frame))
        self._on_load()

    def _outcome(self, frame: Frame) -> Result | bytes | Exception:
        if frame.kind != Kind.RESULT:
            if frame.kind == Kind.PROFILED:
                return bytes(frame.payload)
            code, _, message = str(frame.payload, "utf-8").partition("\n")
            return RemoteError(code, message)
        backend = self._names[frame.backend]
        return Result(
            np.frombuffer(frame.payload, dtype=np.float32).reshape(frame.rows, -1),
            backend,
            self.backends[backend].implementation or "",
            frame.queue_ns,
            frame.batch_ns,
            frame.compute_ns,
            frame.batch_rows,
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what was in flight, since it cannot be known whether it was computed."""
        self.is_up = False
        self._on_change()
        pending, self._pending = self._pending, {}
        self.rows = self.counted = self.shadows = 0
        if not self.lost.done():
            self.lost.set_result(None)
        if self._alarm is not None:
            self._alarm.cancel()
        for each in pending.values():
            self._settle(
                each, WorkerLostError("the worker that held this request ended before it answered; send it again")
            )
        self._on_load()
        requests = sum(each.rows > 0 for each in pending.values())
        if requests:
            log.error("%s: connection lost with %d requests in flight: %s", self.name, requests, exc or "closed")

    def close(self) -> None:
        """Close the connection."""
        if self._transport:
            self._transport.close()


def without_host_paths(state: BackendState) -> BackendState:
    """Return a backend's state as callers may see it; the start screen, and it alone, shows paths."""
    for field in ("reason", "note"):
        sentence: str | None = getattr(state, field)
        if sentence is not None:
            setattr(state, field, without_paths(sentence))
    return state
