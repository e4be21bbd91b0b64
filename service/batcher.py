"""Holds the requests that wait in a worker, and decides which are computed next.

Whatever waits when the engine becomes idle is the next batch, so batches form by themselves under load, and a request
that finds the worker idle is computed at once. `service.hold` says when it pays to give others a moment to join.

A request with more rows than a batch holds is computed in several batches of its own, until the rest fits beside
others. The rest waits again, behind everything that has come by the next batch. So nobody waits for more than one batch
of such a request at a time, and it gets its turn however much comes.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from service.assembly import Assembly

Client = TypeVar("Client")
BEHIND_ALL_NS = 1 << 63


@dataclass(slots=True)
class Waiting(Generic[Client]):
    """One request in the queue, or a part of one; times in nanoseconds of CLOCK_MONOTONIC.

    Attributes:
        accepted_ns: when it was accepted; for the rest of a request that waits again, when it began to.
        assembly: where the results of a request's parts are collected; None for a whole request.
        is_last: whether no other part of the request follows.
    """

    client: Client
    request_id: int
    backend: int
    rows: int
    payload: bytes | bytearray | memoryview
    accepted_ns: int
    deadline_ns: int
    is_cancelled: bool = False
    assembly: Assembly | None = None
    is_last: bool = True

    def cut(self, rows: int) -> tuple["Waiting[Client]", "Waiting[Client]"]:
        """Return its first `rows` rows, which must be fewer than it has, and the others, as parts; copies nothing."""
        assembly = self.assembly or Assembly(self.accepted_ns)
        payload = memoryview(self.payload)
        size = len(payload) // self.rows * rows
        first = replace(self, rows=rows, payload=payload[:size], assembly=assembly, is_last=False)
        return first, replace(self, rows=self.rows - rows, payload=payload[size:], assembly=assembly)


class Batcher(Generic[Client]):
    """A queue per backend, with the backend of the oldest request served first."""

    def __init__(self, backends: int, max_batch_rows: int) -> None:
        self._queues: list[deque[Waiting[Client]]] = [deque() for _ in range(backends)]
        self._waiting: dict[tuple[Client, int], Waiting[Client]] = {}
        self._max_batch_rows = max_batch_rows
        self._rest: Waiting[Client] | None = None  # of the request that the last batch is a part of

    def __len__(self) -> int:
        return len(self._waiting)

    def rows(self, backend: int) -> int:
        """Return the rows that wait for a backend."""
        return sum(request.rows for request in self._queues[backend] if not request.is_cancelled)

    @property
    def is_full(self) -> bool:
        """Whether requests that have not begun fill a batch of some backend, so that others can stay unread.

        The rest of a request that has begun does not count: it waits behind all others, which must be read in time.
        """
        return any(
            sum(each.rows for each in queue if each.assembly is None and not each.is_cancelled) >= self._max_batch_rows
            for queue in self._queues
        )

    @property
    def is_next_full(self) -> bool:
        """Whether the next batch is full, so that nothing that may still come would join it."""
        first = self.first
        return first is not None and self.rows(first.backend) >= self._max_batch_rows

    @property
    def first(self) -> Waiting[Client] | None:
        """The request that waits longest."""
        waiting = [queue[0] for queue in self._queues if queue]
        return min(waiting, key=lambda request: request.accepted_ns, default=None)

    def add(self, request: Waiting[Client]) -> None:
        """Append a request to its backend's queue, but before the rest of the request that the last batch came from."""
        queue = self._queues[request.backend]
        queue.append(request)
        if self._rest is not None and len(queue) > 1 and queue[-2] is self._rest:
            queue[-2], queue[-1] = request, self._rest
        self._waiting[request.client, request.request_id] = request

    def cancel(self, client: Client, request_id: int) -> bool:
        """Take a request out of the queue; False if it is not, or no longer, there."""
        request = self._waiting.pop((client, request_id), None)
        if request is None:
            return False
        request.is_cancelled = True
        if request.assembly is not None:
            request.assembly.is_over = True
        return True

    def drop(self, client: Client) -> int:
        """Forget every request of a client that is gone; return how many there were."""
        theirs = [request_id for owner, request_id in self._waiting if owner is client]
        for request_id in theirs:
            self.cancel(client, request_id)
        return len(theirs)

    def take(self, now_ns: int) -> tuple[list[Waiting[Client]], list[Waiting[Client]]]:
        """Remove and return the next batch, and the requests that expired before their turn.

        The batch holds requests of one backend in the order they came, as many whole ones as fit `max_batch_rows`, or
        as many rows of one that does not fit. It is empty when nothing live waits.
        """
        if self._rest is not None:
            self._rest.accepted_ns, self._rest = now_ns, None
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
                if not batch:
                    batch.append(self._cut_first(oldest))
                break
        return batch, expired

    def _cut_first(self, queue: deque[Waiting[Client]]) -> Waiting[Client]:
        part, rest = queue.popleft().cut(self._max_batch_rows)
        rest.accepted_ns = BEHIND_ALL_NS
        queue.append(rest)
        self._waiting[rest.client, rest.request_id] = self._rest = rest
        return part

    def _remove_first(self, queue: deque[Waiting[Client]], into: list[Waiting[Client]]) -> None:
        request = queue.popleft()
        if not request.is_cancelled:
            del self._waiting[request.client, request.request_id]
            into.append(request)
