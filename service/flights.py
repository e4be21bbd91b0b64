"""Batches on their way to a device and back: they are handed over, and their results are fetched later.

A batch is handed over when the device has computed the one before, so that batches form as they do on a CPU: by what
comes in the meantime. A full batch gains nothing by waiting, and is copied in while the one before it computes. Either
way results are copied out while the next batch is computed.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from models.errors import OutOfMemoryError
from service.batcher import Client, Waiting

if TYPE_CHECKING:
    from models.staging import Passage, Staging


@dataclass(frozen=True, slots=True, eq=False)
class Flight(Generic[Client]):
    """A batch that is handed over; times in nanoseconds of CLOCK_MONOTONIC."""

    batch: list[Waiting[Client]]
    taken_ns: int
    submitted_ns: int
    passage: "Passage"


class Flights(Generic[Client]):
    """The batches in the air, landed in the order they began."""

    def __init__(
        self,
        staging: "Staging",
        backends: tuple[str, ...],
        answer: Callable[[list[Waiting[Client]], int, int, int, memoryview], None],
        fail: Callable[[list[Waiting[Client]], int, Exception], None],
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Land batches by `answer(batch, taken_ns, start_ns, took_ns, outputs)` or `fail(batch, taken_ns, error)`.

        `took_ns` is from the batch's submission, or the landing of the one before it, to its own landing: with both
        copies and what the loop was busy with. `outputs` is overwritten after the call. `fail` may begin parts of its
        batch anew.
        """
        self._staging = staging
        self._backends = backends
        self._answer = answer
        self._fail = fail
        self._clock_ns = clock_ns
        self._in_air: deque[Flight[Client]] = deque()
        self._landed_ns = 0

    def __len__(self) -> int:
        return len(self._in_air)

    @property
    def is_due(self) -> bool:
        """Whether there is a result, or a failure, to land."""
        return bool(self._in_air) and self._in_air[0].passage.is_done

    def may_begin(self, is_full: bool) -> bool:
        """Whether the next batch, which may be full, is to be handed over now."""
        if not self._in_air:
            return True
        return self._staging.has_room and (is_full or self._in_air[-1].passage.is_computed)

    def begin(self, batch: list[Waiting[Client]], taken_ns: int) -> None:
        """Hand a batch over, after landing others if it needs their room.

        Raises:
            MLPError: as `Staging.submit`; OutOfMemoryError means that it does not fit even with nothing else in the
                air.
        """
        while not self._staging.has_room:
            self._land_first()
        try:
            self._submit(batch, taken_ns)
        except OutOfMemoryError:
            if not self._in_air:
                raise
        else:
            return
        self.land_all()
        self._submit(batch, taken_ns)

    def land(self) -> None:
        """Answer what is back, without waiting."""
        while self.is_due:
            self._land_first()

    def land_all(self) -> None:
        """Answer everything in the air."""
        while self._in_air:
            self._land_first()

    def _submit(self, batch: list[Waiting[Client]], taken_ns: int) -> None:
        submitted_ns = self._clock_ns()
        passage = self._staging.submit(
            [request.payload for request in batch],
            sum(request.rows for request in batch),
            self._backends[batch[0].backend],
        )
        self._in_air.append(Flight(batch, taken_ns, submitted_ns, passage))

    def _land_first(self) -> None:
        flight = self._in_air.popleft()
        try:
            outputs = memoryview(flight.passage.result().numpy()).cast("B")  # type: ignore[arg-type]
        except Exception as error:  # the device's, later than the call that was at fault
            flight.passage.release()
            self._fail(flight.batch, flight.taken_ns, error)
            return
        start_ns = max(flight.submitted_ns, self._landed_ns)  # before that the device was another batch's
        self._landed_ns = self._clock_ns()
        try:
            self._answer(flight.batch, flight.taken_ns, start_ns, self._landed_ns - start_ns, outputs)
        finally:
            flight.passage.release()
