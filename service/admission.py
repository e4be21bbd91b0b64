"""How much one HTTP process lets in: the queue's bound."""

from service.errors import OverloadedError

SHORT_WAIT_NS = 50_000_000  # a wait so short is better than a refusal
LATEST_SHARE = 1 / 8  # weight of the last batch in the average of the workers' speed


class Admission:
    """Decides whether a request is let in beside what is in flight; everything is counted in rows.

    A request counts as at most `counted_rows`. The counted rows may add up to `least_rows`, or to what the workers
    compute in `SHORT_WAIT_NS` at the speed of their last batches if that is more, but to no more than `most_rows`: a
    fast model's queue may be long, a slow one's keeps latency down under overload. Batches less than half full say
    little about a queue's speed and are ignored; until there has been a fuller one, the model may be a fast one.

    Requests of half a batch and more take at most `large_share` of the bound, so that those of few rows, which wait for
    one batch of each, are let in beside any number of them.
    """

    def __init__(
        self,
        least_rows: int,
        most_rows: int,
        counted_rows: int,
        batch_rows: int,
        workers: float,
        large_share: float = 1.0,
    ) -> None:
        """`batch_rows` are those of a full batch; `workers` is this process's share of the workers."""
        self.counted_rows = counted_rows
        self.max_rows = most_rows
        self._least_rows = least_rows
        self._most_rows = most_rows
        self._batch_rows = batch_rows
        self._workers = workers
        self._large_share = large_share
        self._told = "" if counted_rows == least_rows else f", where a request counts as {counted_rows} at most"
        self._row_ns = 0.0  # what a row of a batch takes on a worker

    def admit(self, rows: int, in_flight: int) -> None:
        """Let a request of so many rows in while `in_flight` rows count as in flight.

        Raises:
            OverloadedError: there is no room for it.
        """
        limit = self.max_rows if 2 * rows < self._batch_rows else int(self.max_rows * self._large_share)
        if in_flight + min(rows, self.counted_rows) > limit:
            raise OverloadedError(
                f"the queue is full: it holds {in_flight} of {limit} rows{self._told}; try again later"
            )

    def is_filling(self, in_flight: int) -> bool:
        """Whether the queue is more than half full."""
        return 2 * in_flight > self.max_rows

    def learn(self, rows: int, batch_rows: int, compute_ns: int) -> None:
        """Take note of a result, and of how long its batch computed, or all of its batches if it took several."""
        if self._least_rows == self._most_rows or 2 * batch_rows < self._batch_rows:
            return
        computed_rows = max(rows, batch_rows)
        row_ns = compute_ns / computed_rows
        share = LATEST_SHARE * rows / computed_rows  # so that a batch counts once, however many requests it is of
        self._row_ns += (row_ns - self._row_ns) * share if self._row_ns else row_ns
        soon_rows = SHORT_WAIT_NS * self._workers / max(self._row_ns, 1.0)
        self.max_rows = int(min(self._most_rows, max(self._least_rows, soon_rows)))
