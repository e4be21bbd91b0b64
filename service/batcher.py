"""What waits in a worker, and which of it is computed next.

Whatever waits when the engine falls idle is the next batch, so batches form by themselves under load, and a request
that finds the worker idle is computed at once. `service.patience` says when it pays to give others a moment to join.
"""

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

Client = TypeVar("Client")


@dataclass(slots=True)
class Waiting(Generic[Client]):
    """One request in the queue; times in nanoseconds of CLOCK_MONOTONIC."""

    client: Client
    request_id: int
    backend: int
    rows: int
    payload: bytes | bytearray | memoryview
    accepted_ns: int
    deadline_ns: int
    is_cancelled: bool = False


class Batcher(Generic[Client]):
    """A queue per backend, with the backend of the oldest request served first."""

    def __init__(self, backends: int, max_batch_rows: int) -> None:
        self._queues: list[deque[Waiting[Client]]] = [deque() for _ in range(backends)]
        self._waiting: dict[tuple[Client, int], Waiting[Client]] = {}
        self._max_batch_rows = max_batch_rows

    def __len__(self) -> int:
        return len(self._waiting)

    def rows(self, backend: int) -> int:
        """Return the rows that wait for a backend."""
        return sum(request.rows for request in self._queues[backend] if not request.is_cancelled)

    @property
    def is_full(self) -> bool:
        """Whether some backend's next batch would not grow by what may still come."""
        return any(self.rows(backend) >= self._max_batch_rows for backend in range(len(self._queues)))

    @property
    def is_next_full(self) -> bool:
        """Whether the next batch would not grow by what may still come."""
        first = self.first
        return first is not None and self.rows(first.backend) >= self._max_batch_rows

    @property
    def first(self) -> Waiting[Client] | None:
        """The request that waits longest."""
        waiting = [queue[0] for queue in self._queues if queue]
        return min(waiting, key=lambda request: request.accepted_ns, default=None)

    def add(self, request: Waiting[Client]) -> None:
        """Append a request of at most `max_batch_rows` rows to its backend's queue."""
        self._queues[request.backend].append(request)
        self._waiting[request.client, request.request_id] = request

    def cancel(self, client: Client, request_id: int) -> bool:
        """Take a request out of the queue; False where it is not there, or not any more."""
        request = self._waiting.pop((client, request_id), None)
        if request is None:
            return False
        request.is_cancelled = True
        return True

    def drop(self, client: Client) -> int:
        """Forget every request of a client that is gone; return how many there were."""
        theirs = [request_id for owner, request_id in self._waiting if owner is client]
        for request_id in theirs:
            self.cancel(client, request_id)
        return len(theirs)

    def take(self, now_ns: int) -> tuple[list[Waiting[Client]], list[Waiting[Client]]]:
        """Remove and return the next batch, and the requests that expired before their turn.

        The batch holds whole requests of one backend in the order they came, as many as fit `max_batch_rows`. It is
        empty when nothing live waits.
        """
        batch: list[Waiting[Client]] = []
        expired: list[Waiting[Client]] = []
        oldest: deque[Waiting[Client]] | None = None
        for queue in self._queues:
            while queue and (queue[0].is_cancelled or queue[0].deadline_ns <= now_ns):
                self._remove_first(queue, expired)
            if queue and (oldest is None or queue[0].accepted_ns < oldest[0].accepted_ns):
                oldest = queue
        room = self._max_batch_rows
        while oldest:
            first = oldest[0]
            if first.is_cancelled or first.deadline_ns <= now_ns:
                self._remove_first(oldest, expired)
            elif first.rows <= room:
                self._remove_first(oldest, batch)
                room -= first.rows
            else:
                break
        return batch, expired

    def _remove_first(self, queue: deque[Waiting[Client]], into: list[Waiting[Client]]) -> None:
        request = queue.popleft()
        if not request.is_cancelled:
            del self._waiting[request.client, request.request_id]
            into.append(request)
