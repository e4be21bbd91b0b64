"""The results of a request that takes several batches, collected until all are there."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Assembly:
    """The results of such a request so far; times in nanoseconds.

    Each time is the sum over the batches so far, so that all three together go from acceptance to the last result.

    Attributes:
        accepted_ns: when the request was accepted, of CLOCK_MONOTONIC.
        is_over: whether it has failed or was abandoned, so that no further result counts.
        outputs: the results, in the order of the rows.
        waited_ns: until a batch was taken.
        batch_ns: from there until it computed.
        took_ns: computing.
        batch_rows: rows of the largest batch.
    """

    accepted_ns: int
    is_over: bool = False
    outputs: bytearray = field(default_factory=bytearray)
    waited_ns: int = 0
    batch_ns: int = 0
    took_ns: int = 0
    batch_rows: int = 0

    def add(self, outputs: memoryview, taken_ns: int, start_ns: int, took_ns: int, batch_rows: int) -> None:
        """Append the next rows' results, from a batch of `batch_rows` rows that was taken and run at these times."""
        self.outputs += outputs
        reached_ns = self.accepted_ns + self.waited_ns + self.batch_ns + self.took_ns
        begun_ns = max(taken_ns, reached_ns)  # on a GPU a batch may be taken while the one before it computes
        self.waited_ns += begun_ns - reached_ns
        self.batch_ns += max(0, start_ns - begun_ns)
        self.took_ns += took_ns
        self.batch_rows = max(self.batch_rows, batch_rows)
