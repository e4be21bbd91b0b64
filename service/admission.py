"""How much one HTTP process lets in: the queue's bound."""

from service.errors import OverloadedError

SHORT_WAIT_NS = 50_000_000  # shorter than which it is better to wait than to be refused
LATEST_SHARE = 1 / 8  # of the last result in what is known of the workers' speed


class Admission:
    """Says whether a request is let in beside what is in flight; all in rows.

    A request counts as at most `counted_rows`. What counts is at most `least_rows` together, or what the workers
    compute in `SHORT_WAIT_NS` at the speed of their last results, but no more than `most_rows`: a fast model's queue
    may be long, a slow one's keeps latency down under overload. Until there was a result, any may be a fast one.
    """

    def __init__(
        self, least_rows: int, most_rows: int | None = None, counted_rows: int | None = None, workers: float = 1.0
    ) -> None:
        """`most_rows` and `counted_rows` left out are `least_rows`; `workers` are this process's share of them."""
        self.counted_rows = least_rows if counted_rows is None else counted_rows
        self._least_rows = least_rows
        self._most_rows = least_rows if most_rows is None else most_rows
        self._workers = workers
        self._row_ns = 0.0  # what a row takes on a worker
        self.max_rows = self._most_rows

    def admit(self, rows: int, in_flight: int) -> None:
        """Let a request in while so much counts as in flight.

        Raises:
            OverloadedError: there is no room for it.
        """
        if in_flight + min(rows, self.counted_rows) > self.max_rows:
            raise OverloadedError(
                f"the queue is full: {in_flight} rows in flight of at most {self.max_rows}; try again later"
            )

    def is_filling(self, in_flight: int) -> bool:
        """Whether the queue is more than half full."""
        return 2 * in_flight > self.max_rows

    def learn(self, rows: int, compute_ns: int) -> None:
        """Take in how long a worker computed so many rows."""
        if self._least_rows == self._most_rows:
            return
        row_ns = compute_ns / rows
        self._row_ns += (row_ns - self._row_ns) * LATEST_SHARE if self._row_ns else row_ns
        soon_rows = SHORT_WAIT_NS * self._workers / max(self._row_ns, 1.0)
        self.max_rows = int(min(self._most_rows, max(self._least_rows, soon_rows)))
