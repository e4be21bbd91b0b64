"""Overload: the server's capacity, what becomes of three times as much, and how soon the server recovers."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadtests.connection import status_of
from loadtests.errors import LoadTestError
from loadtests.generator.load import Load
from loadtests.generator.target import Target, payloads
from loadtests.measuring.measurement import Measurement, seconds_for

FACTOR = 3.0
SATURATING_USERS = (8, 32, 128)
SEARCH_SECONDS = 2.0  # of each load that finds the users who get most, at most
CAPACITY_SECONDS = 10.0  # of the load that measures what they get, at most
RECOVERY_LIMIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Overload:
    """What was found; times in milliseconds, rates per second."""

    capacity_per_s: float  # the mean of before and after
    capacity_before_per_s: float
    capacity_after_per_s: float
    capacity_p99_ms: float
    offered_per_s: float
    sent_share: float  # of what was due; the rest could not be sent
    goodput_share: float  # answered with 200, of the capacity
    accepted_p99_ms: float | None
    refused: int
    refusal_p50_ms: float | None
    refusal_p99_ms: float | None
    memory_growth: float | None  # from the first tenth of the overload to the last
    memory: list[tuple[float, int]]
    recovery_s: float
    invalid: str | None

    @property
    def p99_ratio(self) -> float | None:
        """How much slower the accepted requests became."""
        return None if self.accepted_p99_ms is None else self.accepted_p99_ms / self.capacity_p99_ms


def overload(measurement: Measurement, target: Target, backend: str, base: Load, seconds: float) -> Overload:
    """Find the capacity of a backend, load the server three times as much, and wait for it to recover.

    The capacity is measured before and after: a host whose speed drifts meanwhile changes both in opposite directions.

    Raises:
        LoadTestError: the capacity could not be found, or the server no longer answers.
    """
    search_s, capacity_s = min(SEARCH_SECONDS, seconds), min(CAPACITY_SECONDS, seconds)
    users = best_users(measurement, base, search_s)
    before_per_s = measurement.run(as_closed(base, users, capacity_s, "capacity before")).answered_per_s
    at_capacity = measurement.run(as_open(base, before_per_s, seconds_for(before_per_s, search_s), "at capacity"))
    limit_ms = at_capacity.latency_ms.p99 if at_capacity.latency_ms else 0.0
    offered_per_s = FACTOR * before_per_s
    run = measurement.run(as_open(base, offered_per_s, seconds, "overload"))
    whole, memory = measurement.tallies[0], measurement.memory
    recovered_s = recovery_s(target, backend, base.kinds[0][1], limit_ms)
    after_per_s = measurement.run(as_closed(base, users, capacity_s, "capacity after")).answered_per_s
    capacity_per_s = statistics.mean((before_per_s, after_per_s))
    return Overload(
        capacity_per_s=capacity_per_s,
        capacity_before_per_s=before_per_s,
        capacity_after_per_s=after_per_s,
        capacity_p99_ms=limit_ms,
        offered_per_s=offered_per_s,
        sent_share=run.sent / max(1, whole.offered),
        goodput_share=run.answered_per_s / capacity_per_s,
        accepted_p99_ms=run.latency_ms.p99 if run.latency_ms else None,
        refused=len(whole.refusals_ms),
        refusal_p50_ms=percentile(whole.refusals_ms, 50),
        refusal_p99_ms=percentile(whole.refusals_ms, 99),
        memory_growth=growth(memory),
        memory=memory,
        recovery_s=recovered_s,
        invalid=run.invalid,
    )


def best_users(measurement: Measurement, base: Load, seconds: float) -> int:
    """Return with how many users a closed loop is answered most often; that rate itself is partly a matter of luck."""
    reached = {}
    for users in SATURATING_USERS:
        reached[users] = measurement.run(as_closed(base, users, seconds, f"{users} users")).answered_per_s
    return max(reached, key=reached.__getitem__)


def as_closed(base: Load, users: int, seconds: float, label: str) -> Load:
    """Return a closed loop of the same requests."""
    return replace(base, loop="closed", label=label, seconds=seconds, users=users)


def as_open(base: Load, rate_per_s: float, seconds: float, label: str) -> Load:
    """Return an open loop of the same requests."""
    return replace(base, loop="open", label=label, seconds=seconds, rate_per_s=rate_per_s, profile="steady")


def recovery_s(target: Target, backend: str, rows: int, limit_ms: float) -> float:
    """Return how long after the load a request is again answered within the p99 at capacity.

    Raises:
        LoadTestError: none was within the limit.
    """
    began_s = time.monotonic()
    sent = payloads(target, backend, rows)[0]
    with target.connect() as connection:
        while time.monotonic() - began_s < RECOVERY_LIMIT_S:
            start_s = time.perf_counter()
            head, _ = target.ask(connection, sent.request, "after the load")
            if status_of(head) == 200 and (time.perf_counter() - start_s) * 1e3 <= limit_ms:
                return time.monotonic() - began_s
            time.sleep(0.01)
    raise LoadTestError(f"no request was answered within {limit_ms:.1f} ms in {RECOVERY_LIMIT_S:g} s after the load")


def growth(memory: list[tuple[float, int]]) -> float | None:
    """Return by what share the memory grew, from the median of the first tenth to that of the last; None: unknown."""
    part = max(1, len(memory) // 10)
    if len(memory) < 2:
        return None
    first, last = (statistics.median(used for _, used in each) for each in (memory[:part], memory[-part:]))
    return last / first - 1 if first else None


def percentile(times_ms: Sequence[float], part: float) -> float | None:
    """Return a percentile, or None of nothing."""
    times = np.asarray(times_ms)
    return float(np.percentile(times, part)) if times.size else None
