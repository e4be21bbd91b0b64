"""How much one HTTP process lets in: the queue's bound."""

from service.errors import OverloadedError

CALM_NS = 1_000_000_000  # without a refusal, before a burst is taken again


class Admission:
    """Says whether a request is let in beside what is in flight; all in rows.

    A request counts as at most `counted_rows`. What counts is at most `max_rows` together, and `burst_rows` more may be
    let in once, until nothing is in flight again and none was refused for a second: a burst on an idle server is taken,
    and under lasting overload `max_rows` is the bound, even where the load pauses for a moment.
    """

    def __init__(self, max_rows: int, counted_rows: int, burst_rows: int = 0) -> None:
        self.counted_rows = counted_rows
        self._max_rows = max_rows
        self._burst_rows = burst_rows
        self._burst_left = burst_rows
        self._refused_ns = -CALM_NS

    def admit(self, rows: int, in_flight: int, now_ns: int) -> None:
        """Let a request in while so much counts as in flight; the time is of any clock that only goes forward.

        Raises:
            OverloadedError: there is no room for it.
        """
        if not in_flight and now_ns - self._refused_ns >= CALM_NS:
            self._burst_left = self._burst_rows
        counted = min(rows, self.counted_rows)
        if in_flight + counted <= self._max_rows:
            return
        if counted > self._burst_left:
            self._refused_ns = now_ns
            limit = f"of at most {self._max_rows}{' while requests keep coming' if self._burst_rows else ''}"
            raise OverloadedError(f"the queue is full: {in_flight} rows in flight {limit}; try again later")
        self._burst_left -= counted

    def is_filling(self, in_flight: int) -> bool:
        """Whether the queue is more than half full."""
        return 2 * in_flight > self._max_rows
