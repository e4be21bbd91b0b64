"""Statistics of locust at a resolution of 10 microseconds, with the server's own times beside them.

Locust rounds latencies to whole milliseconds below 100 ms, and to two digits above, in what it keeps and again in what
it prints: a reply of 0.6 ms and one of 1.4 ms look alike. `refine` replaces both, before locust makes its statistics.
"""

from typing import Any

from locust import stats
from locust.stats import RequestStats, StatsCSV, StatsEntry

DIGITS = 2  # of a millisecond
SERVER_KINDS = frozenset({"QUEUE", "COMPUTE"})


def bucket_response_time(response_time_ms: float) -> float:
    """Return the time, in milliseconds, rounded to 10 microseconds."""
    return round(response_time_ms, DIGITS)


def log_request(self: RequestStats, method: str, name: str, response_time: float, content_length: int) -> None:
    """Keep one time; the times that the server reports have rows of their own, outside the aggregate of requests."""
    if method not in SERVER_KINDS:
        self.total.log(response_time, content_length)  # type: ignore[arg-type]
    self.entries[(name, method)].log(response_time, content_length)  # type: ignore[arg-type]


def to_string(self: StatsEntry, current: bool = True) -> str:
    """Return a line of the console's table."""
    rps = self.current_rps if current else self.total_rps
    failures_per_s = self.current_fail_per_sec if current else self.total_fail_per_sec
    kind = f"{self.method} " if self.method else ""
    failures = f"{self.num_failures}({self.fail_ratio * 100:.2f}%)"
    width = stats.STATS_NAME_WIDTH - stats.STATS_TYPE_WIDTH + 4
    times = (self.avg_response_time, self.min_response_time or 0, self.max_response_time, self.median_response_time)
    average, least, most, median = (f"{time:7.2f}" for time in times)
    return (
        f"{kind:<{stats.STATS_TYPE_WIDTH}} {self.name:<{width}} {self.num_requests:7d} {failures:>12} "
        f"|{average} {least} {most}{median} | {rps:7.2f} {failures_per_s:11.2f}"
    )


def percentile(self: StatsEntry) -> str:
    """Return a line of the console's table of percentiles."""
    times = " ".join(f"{self.get_response_time_percentile(part):6.2f}" for part in stats.PERCENTILES_TO_REPORT)
    kind = f"{self.method or '':<{stats.STATS_TYPE_WIDTH}}"
    return f"{kind} {self.name:<{stats.STATS_NAME_WIDTH}} {times} {self.num_requests:6d}"


def percentile_fields(self: StatsCSV, entry: StatsEntry, use_current: bool = False) -> list[Any]:
    """Return an entry's percentiles for a CSV file."""
    if not entry.num_requests:
        return list(self.percentiles_na)
    if use_current and entry.use_response_times_cache:
        return [entry.get_current_response_time_percentile(part) or 0 for part in self.percentiles_to_report]
    return [entry.get_response_time_percentile(part) for part in self.percentiles_to_report]


def refine() -> None:
    """Make locust keep and show times at 10 microseconds; a second call changes nothing."""
    stats.bucket_response_time = bucket_response_time  # type: ignore[assignment]
    if RequestStats.log_request is log_request:
        return
    whole_milliseconds = StatsEntry.to_dict

    def to_dict(self: StatsEntry, escape_string_values: bool = False) -> dict[str, Any]:
        """Return what the web page shows of an entry."""
        shown: dict[str, Any] = whole_milliseconds(self, escape_string_values)
        return shown | {
            "min_response_time": round(self.min_response_time or 0, DIGITS),
            "max_response_time": round(self.max_response_time, DIGITS),
        }

    RequestStats.log_request = log_request  # type: ignore[method-assign]
    StatsEntry.to_string = to_string  # type: ignore[method-assign]
    StatsEntry.percentile = percentile  # type: ignore[method-assign]
    StatsEntry.to_dict = to_dict  # type: ignore[method-assign]
    StatsCSV._percentile_fields = percentile_fields  # type: ignore[method-assign,assignment]
