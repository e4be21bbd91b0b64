"""Takes requests from admission to their outcome: the least-loaded worker, and a callback per request.

Runs on the event loop of one API process. `service.backends` knows the backends, `service.pool` keeps the connections
to the workers, and `service.link` is one such connection.
"""

from collections.abc import Iterable
from pathlib import Path

from service.admission import Admission
from service.backends import REFERENCE, Backends
from service.errors import DrainingError
from service.link import Deliver, DeliverProfile, WorkerLink
from service.metrics import Metrics
from service.pool import WorkerPool
from service.schemas import InferenceRequest, Rows
from service.shared_state import SharedState

MAX_SHADOWS = 8  # that the workers hold at a time, of each HTTP process
DRAINING = "the server is stopping and takes no new requests; send it to another one"


class Ticket:
    """An admitted request, wherever it is: if it goes on to another backend, its ticket moves along."""

    __slots__ = ("_link", "_metrics", "_request_id")

    def __init__(self, metrics: Metrics | None) -> None:
        """`metrics` counts it if it is abandoned."""
        self._link: WorkerLink | None = None
        self._request_id = 0
        self._metrics = metrics

    def move(self, link: WorkerLink, request_id: int) -> None:
        """Stand from now on for the request with this number at this worker."""
        self._link, self._request_id = link, request_id

    @property
    def is_alone(self) -> bool:
        """Whether its worker has no other request of this process."""
        return self._link is not None and self._link.requests == 1

    def abandon(self) -> bool:
        """Give up the outcome, for which nobody waits any more; it is then never delivered.

        Returns:
            Whether it was still outstanding.
        """
        is_abandoned = self._link is not None and self._link.abandon(self._request_id)
        if is_abandoned and self._metrics is not None:
            self._metrics.abandoned()
        return is_abandoned


class Dispatcher:
    """Admits requests and sends each to the worker with the fewest rows in flight."""

    def __init__(
        self,
        sockets: Iterable[Path],
        backends: tuple[str, ...],
        state: SharedState,
        admission: Admission,
        timeout_s: float,
        metrics: Metrics,
    ) -> None:
        """Take the workers' sockets, the server's backends in wire order, this process's bounds, and its counters."""
        self.backends = Backends(backends, state, metrics)
        self.pool = WorkerPool(sockets, self.backends, state, self._tell_load, timeout_s, admission)
        self.state = state
        self.timeout_s = timeout_s
        self._admission = admission
        self._metrics = metrics

    def _tell_load(self) -> None:
        rows, counted_rows = self.pool.in_flight
        limit_rows = self._admission.max_rows
        self._metrics.in_flight(rows, self.pool.unanswered, self.pool.profiles, counted_rows, limit_rows)

    def submit(
        self,
        request: InferenceRequest,
        backend: str | None,
        accepted_ns: int,
        deliver: Deliver,
        ticket: Ticket | None = None,
    ) -> Ticket:
        """Admit a request and send its rows to a worker; `deliver` is called with its outcome, an error or a result.

        `backend` is the one that runs it; None where there is no default. Its time limit starts at `accepted_ns`, which
        is now by CLOCK_MONOTONIC. It gets `ticket`, or a new one if none is given.

        Raises:
            DrainingError, NotReadyError, OverloadedError: not admitted.
            UnknownBackendError, BackendUnavailableError: the backend it names does not serve.
        """
        if self.state.is_draining:
            raise DrainingError(DRAINING)
        number = self.backends.require_available(backend)
        self._admission.admit(len(request.rows), self.pool.in_flight.counted)
        ticket = ticket or Ticket(self._metrics)
        self._send(request, number, accepted_ns, deliver, ticket)
        return ticket

    def resubmit(
        self, request: InferenceRequest, backend: str, accepted_ns: int, deliver: Deliver, ticket: Ticket
    ) -> None:
        """Send a request that was admitted before to another backend, with the same time limit and ticket.

        Raises:
            NotReadyError: no worker is up.
        """
        self._send(request, self.backends.names.index(backend), accepted_ns, deliver, ticket)

    def _send(self, request: InferenceRequest, number: int, accepted_ns: int, deliver: Deliver, ticket: Ticket) -> None:
        link = self.pool.least_loaded()
        timeout_s = self.timeout_s if request.timeout_s is None else min(self.timeout_s, request.timeout_s)
        ticket.move(link, link.send(request.rows, number, accepted_ns, timeout_s, deliver))

    def shadow(self, rows: Rows, deliver: Deliver) -> bool:
        """Have rows computed by the reference when a worker has nothing else to do.

        Returns:
            Whether they were sent, which they are not while the queue is filling or enough other shadows are pending.
        """
        is_filling = self._admission.is_filling(self.pool.in_flight.counted)
        if self.state.is_draining or is_filling or self.pool.shadows >= MAX_SHADOWS:
            return False
        state = self.backends.states.get(REFERENCE)  # ready on a worker that is up
        if state is None or state.state != "ready":
            return False
        link = self.pool.least_loaded()
        link.shadow(rows, self.backends.names.index(REFERENCE), self.timeout_s, deliver)
        return True

    def profile(self, rows: int, backend: str | None, trace: Path, deliver: DeliverProfile) -> Ticket:
        """Ask a worker for a profile and a trace written to `trace`; `deliver` is called with its outcome.

        Raises:
            DrainingError, NotReadyError, UnknownBackendError, BackendUnavailableError: as `submit`.
        """
        if self.state.is_draining:
            raise DrainingError(DRAINING)
        number = self.backends.require_available(backend)
        link = self.pool.least_loaded()
        ticket = Ticket(None)  # what is counted are inference requests
        ticket.move(link, link.profile(rows, number, trace, self.timeout_s, deliver))
        return ticket
