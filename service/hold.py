"""Decides how long an idle worker holds back what waits, so that callers who were just answered can join the batch.

A batch costs little more than a single row as long as reading the weights takes most of the time. Callers in a closed
loop send their next requests right after their answers; a worker that starts on the first of them leaves all others for
a second batch. Holding back for a time g pays if ``g + T(m + e) < T(m) + T(e)``, where m rows wait, e are about to come
and T(n) is the time of a batch of n rows. T is learnt from the batches that ran, and e from how many requests came
within such a time after earlier answers.

A hold ends when that time has passed since the answers, so nothing is held back on a worker whose last answers are
longer ago. Until then whatever waits may be held, whoever sent it and whichever backend it is for, since one loop
serves all. A single caller meets no delay, however many rows it sends: once it is back, nobody else is expected. If T
grows with the rows from the start, as for a small model, nothing is gained and nothing is held back.
"""

import math

LEAST_NS = 200_000  # what is not worth a hold
EWMA_WEIGHT = 0.2  # of the latest observation, in exponentially weighted moving averages
UNKNOWN = -1.0


class BatchTimes:
    """The time of a batch of n rows on one backend, in nanoseconds: a moving average for each power of two."""

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, float]] = {}  # power to mean rows and mean time

    def add(self, rows: int, took_ns: int) -> None:
        """Learn from one batch."""
        power = rows.bit_length()
        known_rows, known_ns = self._means.get(power, (float(rows), float(took_ns)))
        self._means[power] = (
            known_rows + EWMA_WEIGHT * (rows - known_rows),
            known_ns + EWMA_WEIGHT * (took_ns - known_ns),
        )

    def of(self, rows: float) -> float:
        """Return a batch's time, on a line through the nearest two known sizes; `UNKNOWN` until two are known.

        Beyond the largest known size it grows in proportion, so that no saving is expected there.
        """
        points = sorted(self._means.values())
        if len(points) < 2 or rows <= 0:
            return 0.0 if rows <= 0 else UNKNOWN
        largest_rows, largest_ns = points[-1]
        if rows >= largest_rows:
            return largest_ns * rows / largest_rows
        upper = next(index for index, (known, _) in enumerate(points) if known > rows)
        if upper == 0:
            return points[0][1]
        (low, low_ns), (high, high_ns) = points[upper - 1], points[upper]
        return low_ns + (high_ns - low_ns) * (rows - low) / (high - low)


class Hold:
    """Decides for one worker; all times are of CLOCK_MONOTONIC."""

    def __init__(self, backends: int, share: float) -> None:
        """`share` is how much of the time that would be saved may be spent waiting; 0 holds nothing back."""
        self._share = share
        self._batch_times = [BatchTimes() for _ in range(backends)]
        self._backend = 0
        self._answered_ns = 0
        self._answered = 0  # requests
        self._rows_each = 0.0  # of those
        self._window_ns = 0.0
        self._arrived = 0  # requests within the window
        self._return_rate = 0.0  # requests that came within the window, for each that was answered

    def note_arrival(self, accepted_ns: int) -> None:
        """Take note of a request."""
        if self._answered_ns <= accepted_ns <= self._answered_ns + self._window_ns:
            self._arrived += 1

    def note_answers(self, backend: int, requests: int, rows: int, took_ns: int, now_ns: int) -> None:
        """Take note of a batch, and of the requests whose answers have just been sent with it."""
        self._batch_times[backend].add(rows, took_ns)
        if not requests:  # a part of one that more batches follow for: nobody is about to come back
            return
        if self._answered:
            rate = min(1.0, self._arrived / self._answered)
            self._return_rate += EWMA_WEIGHT * (rate - self._return_rate)
        self._backend, self._answered_ns, self._answered, self._rows_each = backend, now_ns, requests, rows / requests
        self._arrived = 0
        self._window_ns = self._share * took_ns

    def until_ns(self, backend: int, rows: int) -> int:
        """Return until when `rows` waiting for `backend` are held back; a time in the past means not at all."""
        if backend != self._backend:
            return 0
        requests = round(self._answered * self._return_rate) - self._arrived
        if requests < 1:
            return 0
        expected = requests * self._rows_each
        times = self._batch_times[backend]
        parts = (times.of(rows), times.of(expected), times.of(rows + expected))
        if UNKNOWN in parts:
            return 0
        wait_ns = self._share * (parts[0] + parts[1] - parts[2])
        return 0 if wait_ns < LEAST_NS else self._answered_ns + math.floor(wait_ns)
