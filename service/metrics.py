"""The server's counters: kept in memory that all its processes share, written by plain stores, read as Prometheus text.

Each HTTP process has a part of the memory to itself, so no store waits for a lock, and a scrape, whichever process
answers it, adds up all parts: what it shows is exact. prometheus-client's own multi-process mode keeps a file for each
process, which outlives it, and takes several times as long per observation.
"""

import mmap
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, count
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from service.errors import STATUS

NO_BACKEND = "none"
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
ROWS = tuple(float(1 << power) for power in range(15))
DRIFTS = (1e-7, 1e-6, 1e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 10.0)
FALLBACK_REASONS = ("drift", "non_finite", "fault", "unavailable")
STATUSES = (200, *sorted(set(STATUS.values())))
CODES = tuple(sorted(STATUS))
_WORD_BYTES = 8


class _Histogram(NamedTuple):
    name: str
    documentation: str
    bounds: Sequence[float]

    @property
    def words(self) -> int:
        return len(self.bounds) + 2  # a bucket a bound, one for what exceeds them, and the sum


REQUEST_SECONDS = _Histogram("mlp_request_seconds", "From a request's head to its reply, answered with 200.", SECONDS)
QUEUE_SECONDS = _Histogram(
    "mlp_queue_seconds", "From a request's acceptance to its batch, and between its batches.", SECONDS
)
COMPUTE_SECONDS = _Histogram("mlp_compute_seconds", "A request's batch, or batches, in the engine.", SECONDS)
BATCH_ROWS = _Histogram(
    "mlp_batch_rows", "Rows of the batch that a request was computed in, the largest where it took several.", ROWS
)
REQUEST_HISTOGRAMS = (REQUEST_SECONDS, QUEUE_SECONDS, COMPUTE_SECONDS, BATCH_ROWS)
SHADOW_DRIFT = _Histogram(
    "mlp_shadow_drift",
    "Largest difference from eager of a request that was run on it as well, relative to the row's largest output.",
    DRIFTS,
)
HISTOGRAMS = (*REQUEST_HISTOGRAMS, SHADOW_DRIFT)


class Metrics(Collector):
    """All metrics of one server; made before its processes are forked.

    A process that counts calls `claim` first. Words are float64: exact for whole numbers up to 2**53.
    """

    def __init__(self, backends: Sequence[str], processes: int) -> None:
        self._backends = tuple(backends)
        self._processes = processes
        words = count()

        def stretch(size: int) -> int:
            start = next(words)
            for _ in range(size - 1):
                next(words)
            return start

        self._requests = stretch((len(backends) + 1) * len(STATUSES))
        self._rejected = stretch(len(CODES))
        self._queue_rows = stretch(1)
        self._queue_counted_rows = stretch(1)
        self._queue_limit_rows = stretch(1)
        self._in_flight = stretch(1)
        self._profiles = stretch(1)
        self._abandoned = stretch(1)
        self._fallbacks = stretch(len(backends) * len(FALLBACK_REASONS))
        self._histograms = {(h.name, b): stretch(h.words) for h in HISTOGRAMS for b in range(len(backends))}
        self._size = next(words)
        # One word of all processes' comes first (worker restarts), and one byte for each process's claim at the end.
        self._memory = mmap.mmap(-1, (1 + processes * self._size) * _WORD_BYTES + processes)
        self._view = memoryview(self._memory)[: (1 + processes * self._size) * _WORD_BYTES].cast("d")
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._status_index = {status: index for index, status in enumerate(STATUSES)}
        self._code_index = {code: index for index, code in enumerate(CODES)}
        self._backend_index = {name: index for index, name in enumerate((*self._backends, NO_BACKEND))}
        self.claim(0)

    def claim(self, process: int) -> None:
        """Count into the part of the HTTP process number `process` from now on."""
        self._base = 1 + process * self._size
        self._words: list[
            list[tuple[Sequence[float], int, int]]
        ] = []  # of each backend's histograms: the bounds, the first bucket, the sum
        for index in range(len(self._backends)):
            starts = [(each, self._base + self._histograms[each.name, index]) for each in REQUEST_HISTOGRAMS]
            self._words.append([(each.bounds, start, start + each.words - 1) for each, start in starts])

    def answered(
        self, backend: str, seconds: float, queue_seconds: float, compute_seconds: float, batch_rows: int
    ) -> None:
        """Count a request that was answered with its result."""
        index = self._backend_index[backend]
        view = self._view
        view[self._base + self._requests + index * len(STATUSES)] += 1  # 200 is the first status
        values = (seconds, queue_seconds, compute_seconds, batch_rows)
        for (bounds, first, total), value in zip(self._words[index], values, strict=True):
            view[first + bisect_left(bounds, value)] += 1
            view[total] += value

    def refused(self, backend: str | None, code: str) -> None:
        """Count a request that was answered with an error; `backend` is the one it was for, as far as known."""
        index = self._backend_index.get(backend or NO_BACKEND, len(self._backends))
        status = self._status_index[STATUS[code]]
        self._view[self._base + self._requests + index * len(STATUSES) + status] += 1
        self._view[self._base + self._rejected + self._code_index[code]] += 1

    def abandoned(self) -> None:
        """Count a request whose caller went away before its answer."""
        self._view[self._base + self._abandoned] += 1

    def drifted(self, backend: str, drift: float) -> None:
        """Count how far from eager a backend's result was found to be."""
        start = self._base + self._histograms[SHADOW_DRIFT.name, self._backend_index[backend]]
        self._view[start + bisect_left(DRIFTS, drift)] += 1
        self._view[start + SHADOW_DRIFT.words - 1] += drift

    def fell_back(self, backend: str, reason: str) -> None:
        """Count that a backend was taken out; `reason` is one of FALLBACK_REASONS."""
        place = self._backend_index[backend] * len(FALLBACK_REASONS) + FALLBACK_REASONS.index(reason)
        self._view[self._base + self._fallbacks + place] += 1

    def in_flight(self, rows: int, requests: int, profiles: int, counted_rows: int, limit_rows: int) -> None:
        """Set what the workers hold for this process, who waits for it, how much counts as queued, and the bound.

        `requests` and `profiles` are the numbers of waiting callers; all else are rows.
        """
        view, base = self._view, self._base
        view[base + self._queue_rows] = rows
        view[base + self._in_flight] = requests
        view[base + self._profiles] = profiles
        view[base + self._queue_counted_rows] = counted_rows
        view[base + self._queue_limit_rows] = limit_rows

    def worker_restarted(self) -> None:
        """Count a worker that was started anew; called by the parent alone."""
        self._view[0] += 1

    def _total(self, word: int) -> float:
        return sum(self._view[1 + process * self._size + word] for process in range(self._processes))

    def collect(self) -> Iterable[Metric]:
        """Add up all processes."""
        requests = CounterMetricFamily(
            "mlp_requests", "Inference requests answered, by backend and status.", labels=("backend", "status")
        )
        for name, index in self._backend_index.items():
            for place, status in enumerate(STATUSES):
                total = self._total(self._requests + index * len(STATUSES) + place)
                if total or status == 200:
                    requests.add_metric((name, str(status)), total)
        yield requests
        rejected = CounterMetricFamily("mlp_rejected", "Inference requests answered with an error.", labels=("code",))
        for code, index in self._code_index.items():
            rejected.add_metric((code,), self._total(self._rejected + index))
        yield rejected
        yield CounterMetricFamily(
            "mlp_abandoned",
            "Inference requests whose caller went away before the answer.",
            self._total(self._abandoned),
        )
        yield GaugeMetricFamily(
            "mlp_queue_rows",
            "Rows that the workers hold, those of requests that ended before their result included.",
            self._total(self._queue_rows),
        )
        yield GaugeMetricFamily(
            "mlp_queue_counted_rows",
            "Rows that count towards the queue's bound: of each request no more than it counts as.",
            self._total(self._queue_counted_rows),
        )
        yield GaugeMetricFamily(
            "mlp_queue_limit_rows",
            "The queue's bound in force: so many rows may count, beyond it requests get 429.",
            self._total(self._queue_limit_rows),
        )
        yield GaugeMetricFamily(
            "mlp_inflight_requests",
            "Inference requests accepted whose callers wait for their answer.",
            self._total(self._in_flight),
        )
        yield GaugeMetricFamily(
            "mlp_inflight_profiles", "Profiles whose callers wait for them.", self._total(self._profiles)
        )
        yield CounterMetricFamily("mlp_worker_restarts", "Workers started anew after they ended.", self._view[0])
        fallbacks = CounterMetricFamily(
            "mlp_backend_fallbacks", "Times a backend was taken out, by reason.", labels=("backend", "reason")
        )
        for index, name in enumerate(self._backends):
            for place, reason in enumerate(FALLBACK_REASONS):
                total = self._total(self._fallbacks + index * len(FALLBACK_REASONS) + place)
                fallbacks.add_metric((name, reason), total)
        yield fallbacks
        for histogram in HISTOGRAMS:
            family = HistogramMetricFamily(histogram.name, histogram.documentation, labels=("backend",))
            for index, name in enumerate(self._backends):
                start = self._histograms[histogram.name, index]
                totals = [self._total(start + offset) for offset in range(histogram.words)]
                bounds = (*(f"{bound:g}" for bound in histogram.bounds), "+Inf")
                buckets = list(zip(bounds, accumulate(totals[:-1]), strict=True))
                family.add_metric((name,), buckets, totals[-1])
            yield family

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self._registry)
