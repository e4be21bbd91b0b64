"""What waits in a worker, and which of it is computed next.

There is no delay by design: whatever waits when the engine falls idle is the next batch, so batches form by themselves
under load and a lone request never waits for company.
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


class Batcher(Generic[Client]):
    """A queue per backend, with the backend of the oldest request served first."""

    def __init__(self, backends: int, max_batch_rows: int) -> None:
        self._queues: list[deque[Waiting[Client]]] = [deque() for _ in range(backends)]
        self._max_batch_rows = max_batch_rows
        self.rows = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def add(self, request: Waiting[Client]) -> None:
        """Append a request of at most `max_batch_rows` rows to its backend's queue."""
        self._queues[request.backend].append(request)
        self.rows += request.rows

    def take(self, now_ns: int) -> tuple[list[Waiting[Client]], list[Waiting[Client]]]:
        """Remove and return the next batch, and the requests that expired before their turn.

        The batch holds whole requests of one backend in the order they came, as many as fit `max_batch_rows`. It is
        empty when nothing live waits.
        """
        batch: list[Waiting[Client]] = []
        expired: list[Waiting[Client]] = []
        for queue in self._queues:
            while queue and queue[0].deadline_ns <= now_ns:
                expired.append(queue.popleft())
        waiting = [queue for queue in self._queues if queue]
        if waiting:
            oldest = min(waiting, key=lambda queue: queue[0].accepted_ns)
            room = self._max_batch_rows
            while oldest and (oldest[0].rows <= room or oldest[0].deadline_ns <= now_ns):
                request = oldest.popleft()
                if request.deadline_ns <= now_ns:
                    expired.append(request)
                    continue
                batch.append(request)
                room -= request.rows
        self.rows -= sum(request.rows for request in batch) + sum(request.rows for request in expired)
        return batch, expired

    def drop(self, client: Client) -> int:
        """Forget every request of a client that is gone; return how many there were."""
        dropped = 0
        for index, queue in enumerate(self._queues):
            kept = deque(request for request in queue if request.client is not client)
            dropped += len(queue) - len(kept)
            self.rows -= sum(request.rows for request in queue) - sum(request.rows for request in kept)
            self._queues[index] = kept
        return dropped
