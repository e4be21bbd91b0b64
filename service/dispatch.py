"""From an admitted request to its outcome: admission, the least-loaded worker, a callback per request.

Runs on the event loop of one API process and owns that process's connections to the workers.
"""

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import orjson

from models.errors import BackendUnavailableError, UnknownBackendError
from service.errors import (
    BadRequestError,
    DeadlineExceededError,
    DrainingError,
    NotReadyError,
    OverloadedError,
    RemoteError,
    WorkerLostError,
    without_paths,
)
from service.metrics import Metrics
from service.schemas import BackendState, InferenceRequest, Rows, shortened
from service.shared_state import AUTO, Outage, SharedState
from service.wire import Decoder, Frame, Kind, header

PREFERENCE = ("fused", "compiled", "eager")
REFERENCE = "eager"  # what the others are held to
MAX_SHADOWS = 8  # that wait at a time, of each HTTP process
RECONNECT_INTERVAL_S = 0.05
FRAMES_PER_WRITE = 8  # the worker starts on the first of many while the rest are still being read
NEVER_NS = 1 << 63
DRAINING = "the server is stopping and takes no new requests; send it to another one"
NOT_READY = "no worker is warm yet; try again when /v2/health/ready answers 200"
log = logging.getLogger(__name__)


class Result(NamedTuple):
    """What came back for one request; times in nanoseconds."""

    rows: Rows  # (n, width_out)
    backend: str
    implementation: str
    queue_ns: int  # from acceptance until its batch was taken
    batch_ns: int  # from there until the batch computed: being put together, and what was tried before
    compute_ns: int
    batch_rows: int


Deliver = Callable[[Result | Exception], None]
"""Takes a request's outcome, once, on the event loop."""

DeliverProfile = Callable[[bytes | Exception], None]
"""Takes a profile as the JSON that the worker wrote, likewise."""


@dataclass(slots=True)
class _Pending:
    deliver: Callable[[Any], None] | None  # None once the caller has its outcome, or is gone
    rows: int
    deadline_ns: int
    timeout_s: float


class WorkerLink(asyncio.Protocol):
    """One connection to one worker; counts as up from the worker's first frame to the connection's end."""

    def __init__(
        self, name: str, backends: tuple[str, ...], on_change: Callable[[], None], on_load: Callable[[], None]
    ) -> None:
        """`backends` are the server's, in wire order; `on_load` is told when rows came or went."""
        self.name = name
        self._names = backends
        self._on_change = on_change
        self._on_load = on_load
        self.backends: dict[str, BackendState] = {}
        self.is_up = False
        self.rows = 0  # sent and not yet answered by the worker, whatever became of the caller
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
        """Requests sent and not yet answered by the worker."""
        return len(self._pending)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's does not derive from asyncio's

    def send(self, rows: Rows, backend: int, accepted_ns: int, timeout_s: float, deliver: Deliver) -> int:
        """Queue rows for the worker, those of one loop turn in two writes; return the request's number here."""
        request_id = next(self._ids)
        deadline_ns = accepted_ns + int(timeout_s * 1e9)
        count = len(rows)
        payload = rows.data.cast("B")
        head = header(Kind.INFER, request_id, len(payload), backend, count, accepted_ns, deadline_ns)
        self._send(head, payload)
        self._pending[request_id] = _Pending(deliver, count, deadline_ns, timeout_s)
        self.rows += count
        if deadline_ns < self._alarm_ns:
            self._set_alarm(deadline_ns)
        return request_id

    def profile(self, rows: int, backend: int, trace: Path, timeout_s: float, deliver: DeliverProfile) -> int:
        """Ask the worker for a profile; return the request's number here. Its rows are none of the queue's."""
        return self._ask(Kind.PROFILE, str(trace).encode(), backend, rows, timeout_s, deliver)

    def shadow(self, rows: Rows, backend: int, timeout_s: float, deliver: Deliver) -> None:
        """Have rows computed when the worker has nothing else to do; they are none of the queue's."""
        self._ask(Kind.SHADOW, rows.data.cast("B"), backend, len(rows), timeout_s, deliver)

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
        self._pending[request_id] = _Pending(deliver, 0, deadline_ns, timeout_s)
        if deadline_ns < self._alarm_ns:
            self._set_alarm(deadline_ns)
        return request_id

    def abandon(self, request_id: int) -> bool:
        """Forget a request whose caller is gone: the worker need not compute what still waits there.

        Returns:
            Whether the request was still unanswered.
        """
        pending = self._pending.get(request_id)
        if pending is None or pending.deliver is None:
            return False
        pending.deliver = None
        self._send(header(Kind.CANCEL, request_id, 0))
        return True

    def fail_all(self, error: Exception) -> None:
        """Answer everything in flight with an error; late results are dropped on arrival."""
        for pending in self._pending.values():
            settle(pending, error)

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
        for pending in self._pending.values():
            if pending.deliver is not None and pending.deadline_ns <= now_ns:
                late = f"no result within {pending.timeout_s * 1e3:g} ms; ask for fewer rows or a longer timeout"
                settle(pending, DeadlineExceededError(late))
        nearest = min((each.deadline_ns for each in self._pending.values() if each.deliver is not None), default=None)
        if nearest is not None:
            self._set_alarm(nearest)

    def data_received(self, data: bytes) -> None:
        """Deliver the results that are now whole."""
        for frame in self._decoder.feed(data):
            if frame.kind == Kind.HELLO:
                states = orjson.loads(frame.payload)["backends"]
                self.backends = {name: told(BackendState.model_validate(state)) for name, state in states.items()}
                self.is_up = True
                self._on_change()
                continue
            pending = self._pending.pop(frame.request_id, None)
            if pending is None:
                log.error("%s: a result for a request that is not in flight", self.name)
                continue
            self.rows -= pending.rows
            if pending.deliver is not None:
                settle(pending, self._outcome(frame))
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
            frame.start_ns,
            frame.batch_ns,
            frame.end_ns,
            frame.batch_rows,
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what was in flight: it cannot be known whether it was computed."""
        self.is_up = False
        self._on_change()
        pending, self._pending = self._pending, {}
        self.rows = 0
        if not self.lost.done():
            self.lost.set_result(None)
        if self._alarm is not None:
            self._alarm.cancel()
        for each in pending.values():
            settle(each, WorkerLostError("the worker that held this request ended before it answered; send it again"))
        self._on_load()
        requests = sum(each.rows > 0 for each in pending.values())
        if requests:
            log.error("%s: connection lost with %d requests in flight: %s", self.name, requests, exc or "closed")

    def close(self) -> None:
        """Close the connection."""
        if self._transport:
            self._transport.close()


def told(state: BackendState) -> BackendState:
    """Return a backend's state as callers may see it; the start screen, and it alone, shows paths."""
    for field in ("reason", "note"):
        sentence: str | None = getattr(state, field)
        if sentence is not None:
            setattr(state, field, without_paths(sentence))
    return state


def settle(pending: _Pending, outcome: Result | bytes | Exception) -> None:
    """Hand an outcome to whoever waits for it, unless that has happened; one that fails at it harms no other."""
    if pending.deliver is not None:
        deliver, pending.deliver = pending.deliver, None
        try:
            deliver(outcome)
        except Exception:
            log.exception("an outcome could not be delivered")


class Ticket(NamedTuple):
    """An admitted request."""

    link: WorkerLink
    request_id: int
    metrics: Metrics

    def abandon(self) -> None:
        """Say that nobody waits for the outcome any more; it is then never delivered."""
        if self.link.abandon(self.request_id):
            self.metrics.abandoned()


class Dispatcher:
    """Admits requests and sends each to the worker with the fewest rows in flight."""

    def __init__(
        self,
        sockets: Iterable[Path],
        backends: tuple[str, ...],
        state: SharedState,
        max_queue_rows: int,
        timeout_s: float,
        metrics: Metrics,
    ) -> None:
        """Args are the workers' sockets, the server's backends in wire order, this process's bounds, its counters."""
        self.backends = backends
        self._metrics = metrics
        self.state = state
        self._sockets = list(sockets)
        self._links: list[WorkerLink | None] = [None] * len(self._sockets)
        self._max_queue_rows = max_queue_rows
        self.timeout_s = timeout_s
        self._tasks: list[asyncio.Task[None]] = []
        self._up: list[WorkerLink] = []
        self._process: int | None = None
        self._shadows = 0  # sent and not yet answered
        self._derive()

    def start(self, process: int) -> None:
        """Connect to every worker, now and whenever it comes back; `process` is this HTTP process's number."""
        self._process = process
        self._tasks = [asyncio.create_task(self._stay_connected(index)) for index in range(len(self._sockets))]

    async def close(self) -> None:
        """Close the connections, which tells the workers that no request will follow."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            if link:
                link.close()

    async def _stay_connected(self, index: int) -> None:
        path = self._sockets[index]
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):
                _, link = await loop.create_unix_connection(lambda: self.link(index), str(path))
                await link.lost
                self._links[index] = None
                self._refresh()
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    def link(self, index: int) -> WorkerLink:
        """Return a new link to the worker number `index`; it serves from its first frame on."""
        link = WorkerLink(self._sockets[index].stem, self.backends, self._refresh, self._tell_load)
        self._links[index] = link
        return link

    def give_up(self) -> None:
        """Answer what is still in flight at the end of the time to drain."""
        for link in self._links:
            if link:
                link.fail_all(
                    DrainingError("the server had to stop before this request's result was there; send it again")
                )

    @property
    def is_ready(self) -> bool:
        """Whether every worker is warm and the server is not stopping."""
        return len(self._up) == len(self._links) and not self.state.is_draining

    @property
    def rows_in_flight(self) -> int:
        """Rows accepted by this process and not yet answered."""
        rows = 0
        for link in self._links:
            if link:
                rows += link.rows
        return rows

    @property
    def states(self) -> dict[str, BackendState]:
        """Each backend's state; unavailable on one worker is unavailable, and so is what was taken out."""
        if self.state.changes != self._changes:
            self._derive()
        return self._states

    def _tell_load(self) -> None:
        requests = sum(link.requests for link in self._links if link)
        self._metrics.in_flight(self.rows_in_flight, requests - self._shadows)

    def _refresh(self) -> None:
        self._up = [link for link in self._links if link and link.is_up]
        self._derive()
        if self._process is not None:
            self.state.set_ready(self._process, len(self._up) == len(self._links))

    def _derive(self) -> None:
        """Work out from the workers' states and the shared one what each request would ask anew."""
        self._changes = self.state.changes
        self._states = self._merged_states()
        self._default = self._chosen_default()
        edge = 0.0
        self._canaries: list[tuple[float, str]] = []
        for name, weight in self.canary.items():
            if self._states[name].state == "ready":
                edge += weight
                self._canaries.append((edge, name))

    def _merged_states(self) -> dict[str, BackendState]:
        starting = {name: BackendState(implementation=None, state="starting", reason=None) for name in self.backends}
        merged = dict(self._up[0].backends) if self._up else starting
        for link in self._up[1:]:
            merged.update({name: state for name, state in link.backends.items() if state.state == "unavailable"})
        for index, name in enumerate(self.backends):
            outage = self.state.outage(index)
            if outage is not None and merged[name].state == "ready":
                since = datetime.fromtimestamp(outage.since_s, UTC).isoformat(timespec="seconds")
                reason = f"taken out at {since}: {outage.reason}"
                merged[name] = merged[name].model_copy(
                    update={"state": "unavailable", "reason": reason, "taken_out_at": since}
                )
        return merged

    def _chosen_default(self) -> str | None:
        index = self.state.default_backend
        if index != AUTO and self.state.outage(index) is None:
            return self.backends[index]
        for name in PREFERENCE:
            if name in self._states and self._states[name].state == "ready":
                return name
        return None

    def default_backend(self) -> str | None:
        """Return the backend of requests that name none; None where it follows what is available and nothing is.

        It follows what is available where that is asked for, and where the one that is set has been taken out.
        """
        if self.state.changes != self._changes:
            self._derive()
        return self._default

    def route(self) -> str | None:
        """Return the backend of the next request that names none: a canary in its share of them, else the default."""
        if self.state.changes != self._changes:
            self._derive()
        if not self._canaries:
            return self._default
        drawn = random.random()  # noqa: S311
        return next((name for edge, name in self._canaries if drawn < edge), self._default)

    @property
    def canary(self) -> dict[str, float]:
        """The share of the requests that name no backend which each canary takes."""
        return {name: weight for name, weight in zip(self.backends, self.state.canary, strict=True) if weight}

    def set_canary(self, weights: Mapping[str, float]) -> None:
        """Set the canaries in every API process at once; a backend that is not named has no share.

        Raises:
            UnknownBackendError: there is no such backend.
        """
        self.require_known(weights)
        self.state.canary = [weights.get(name, 0.0) for name in self.backends]

    def require_known(self, names: Iterable[str]) -> None:
        """Refuse names that are no backend's.

        Raises:
            UnknownBackendError: one of them is not.
        """
        for name in names:
            if name not in self.backends:
                raise UnknownBackendError(name, self.backends)

    def take_out(self, name: str, kind: str, reason: str) -> bool:
        """Let nobody use a backend until it is put back, in every API process at once, and say so.

        `kind` is one of `metrics.FALLBACK_REASONS`, `reason` a sentence without a full stop. The reference is never
        taken out, nor what nothing else could take the place of: it is left as it is, and so is one that is out.

        Returns:
            Whether it was taken out by this call.
        """
        others = [other for other, state in self.states.items() if other != name and state.state == "ready"]
        if name == REFERENCE or not others:
            return False
        reason = f'{reason}; PUT /backend {{"default": "{name}"}} puts it back'
        if not self.state.take_out(self.backends.index(name), Outage(time.time(), reason)):
            return False
        self._metrics.fell_back(name, kind)
        log.error(
            "backend %s is taken out and requests that name none go to %s: %s",
            name,
            self.default_backend(),
            reason,
            extra={"backend": name, "reason": kind},
        )
        return True

    @property
    def is_auto(self) -> bool:
        """Whether the default follows what is available."""
        return self.state.default_backend == AUTO

    def set_default_backend(self, name: str) -> None:
        """Switch the default, in every API process at once; `auto` follows what is available.

        A backend that was taken out is put back.

        Raises:
            BadRequestError, BackendUnavailableError: it would not serve.
        """
        if name == "auto":
            self.state.default_backend = AUTO
            return
        if name not in self.backends:
            raise BadRequestError(
                f"default: expected one of {', '.join(self.backends)}, or auto for the best available, got "
                f"{shortened(name)}"
            )
        if self.state.outage(self.backends.index(name)) is not None:
            self.state.put_back(self.backends.index(name))
            log.warning("backend %s is put back", name, extra={"backend": name})
        self._require_available(name)
        self.state.default_backend = self.backends.index(name)

    def _require_available(self, name: str) -> BackendState:
        if name not in self.backends:
            raise UnknownBackendError(name, self.backends)
        states = self.states
        if states[name].state == "starting":
            raise NotReadyError(NOT_READY)
        if states[name].state != "ready":
            ready = tuple(other for other in self.backends if states[other].state == "ready")
            raise BackendUnavailableError(name, states[name].reason or "no reason given", ready)
        return states[name]

    def submit(self, request: InferenceRequest, backend: str | None, accepted_ns: int, deliver: Deliver) -> Ticket:
        """Admit a request and send its rows to a worker; `deliver` is called with its outcome, an error or a result.

        `backend` is the one that runs it, None where no default can be had. Its time to be answered in starts at
        `accepted_ns`, which is now, of CLOCK_MONOTONIC.

        Raises:
            DrainingError, NotReadyError, OverloadedError: not admitted.
            UnknownBackendError, BackendUnavailableError: the backend it names does not serve.
        """
        if self.state.is_draining:
            raise DrainingError(DRAINING)
        if backend is None:
            raise NotReadyError(NOT_READY)
        self._require_available(backend)
        in_flight = self.rows_in_flight
        if in_flight + len(request.rows) > self._max_queue_rows:
            raise OverloadedError(
                f"the queue is full: {in_flight} rows in flight of at most {self._max_queue_rows}; try again later"
            )
        link = self._up[0] if len(self._up) == 1 else min(self._up, key=lambda link: link.rows)
        timeout_s = self.timeout_s if request.timeout_s is None else min(self.timeout_s, request.timeout_s)
        request_id = link.send(request.rows, self.backends.index(backend), accepted_ns, timeout_s, deliver)
        return Ticket(link, request_id, self._metrics)

    def resubmit(self, request: InferenceRequest, backend: str, accepted_ns: int, deliver: Deliver) -> None:
        """Send a request that was admitted before to another backend; its time goes on.

        Raises:
            NotReadyError: no worker is up.
        """
        if not self._up:
            raise NotReadyError(NOT_READY)
        link = min(self._up, key=lambda link: link.rows)
        timeout_s = self.timeout_s if request.timeout_s is None else min(self.timeout_s, request.timeout_s)
        link.send(request.rows, self.backends.index(backend), accepted_ns, timeout_s, deliver)

    def shadow(self, rows: Rows, deliver: Deliver) -> bool:
        """Have rows computed by the reference when a worker has nothing else to do.

        Returns:
            Whether they were sent: not while the queue is filling, or while enough others wait.
        """
        state = self.states.get(REFERENCE)
        is_filling = 2 * self.rows_in_flight > self._max_queue_rows
        if self.state.is_draining or is_filling or self._shadows >= MAX_SHADOWS or not self._up:
            return False
        if state is None or state.state != "ready":
            return False

        def delivered(outcome: Result | Exception) -> None:
            self._shadows -= 1
            deliver(outcome)

        self._shadows += 1
        link = min(self._up, key=lambda link: link.rows)
        link.shadow(rows, self.backends.index(REFERENCE), self.timeout_s, delivered)
        return True

    def profile(self, rows: int, backend: str | None, trace: Path, deliver: DeliverProfile) -> Ticket:
        """Ask a worker for a profile and a trace written to `trace`; `deliver` is called with its outcome.

        Raises:
            DrainingError, NotReadyError, UnknownBackendError, BackendUnavailableError: as `submit`.
        """
        if self.state.is_draining:
            raise DrainingError(DRAINING)
        if backend is None:
            raise NotReadyError(NOT_READY)
        self._require_available(backend)
        link = min(self._up, key=lambda link: link.rows)
        request_id = link.profile(rows, self.backends.index(backend), trace, self.timeout_s, deliver)
        return Ticket(link, request_id, self._metrics)
