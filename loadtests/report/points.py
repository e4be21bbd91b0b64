"""The runs of a comparison, grouped: one backend under one load over the rounds, with the spread between them."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from loadtests.evidence import Evidence, Run

FAILED_SHARE = 0.01  # of what was due: above it, the latency of what was answered tells half of the story
FEWEST_ABOVE = 1  # requests beyond a percentile: with fewer it is little else than the longest
FEWEST_POINTS = 3  # that make a line


@dataclass(frozen=True, slots=True, order=True)
class OfferedLoad:
    """What was asked of the server: `amount` users of a closed loop, or requests a second of an open one."""

    loop: str
    amount: float

    def __str__(self) -> str:
        if self.loop == "open":
            return f"{number(self.amount)} requests/s"
        return "1 user" if self.amount == 1 else f"{self.amount:g} users"


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    q1: float
    q3: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Return the spread of at least one value; the quartiles include the extremes."""
        each = sorted(values)
        q1, median, q3 = statistics.quantiles(each, n=4, method="inclusive") if len(each) > 1 else each * 3
        return cls(median, q1, q3, each[0], each[-1])


@dataclass(frozen=True, slots=True)
class Point:
    """One backend under one load: the runs that count, and those that do not."""

    backend: str
    load: OfferedLoad
    counted: tuple[Run, ...]
    rejected: tuple[Run, ...]
    is_search: bool = False  # tried in the search for a knee

    def spread(self, figure: Callable[[Run], float | None]) -> Spread | None:
        """Return a figure's spread over the runs that count and have it; None where none has."""
        values = [value for run in self.counted if (value := figure(run)) is not None]
        return Spread.of(values) if values else None

    @property
    def rounds(self) -> int:
        """In how many rounds a run counts."""
        return len({run.round for run in self.counted})

    @property
    def runs(self) -> tuple[Run, ...]:
        """All of them."""
        return (*self.counted, *self.rejected)

    @property
    def failed_share(self) -> float:
        """What share of the requests that were due was not answered with 200, in the runs that count."""
        all_due = sum(run.due for run in self.counted)
        return 1 - sum(run.answered for run in self.counted) / all_due if all_due else 0.0


def fault(run: Run) -> str | None:
    """Return why a run does not count: it is invalid, or an answer was wrong; None where it counts."""
    if run.invalid is not None:
        return run.invalid
    return f"{run.wrong} of {run.checked} checked replies were wrong" if run.wrong else None


def load_of(run: Run) -> OfferedLoad:
    """Return the load of a run."""
    amount = run.rate_per_s if run.loop == "open" else run.users
    return OfferedLoad(run.loop, float(amount or 0))


def points(evidence: Evidence, loop: str | None = None) -> list[Point]:
    """Return the points of one kind of loop, or of both, by load and then in the order of the backends.

    What the search tried stands apart from what was measured at the same load.
    """
    groups: dict[tuple[OfferedLoad, str, bool], list[Run]] = {}
    for run in evidence.runs:
        if loop in (None, run.loop):
            groups.setdefault((load_of(run), run.backend, run.is_search), []).append(run)
    order = {name: place for place, name in enumerate(evidence.backends)}
    return [
        Point(
            backend,
            load,
            tuple(run for run in runs if fault(run) is None),
            tuple(run for run in runs if fault(run) is not None),
            is_search,
        )
        for (load, backend, is_search), runs in sorted(
            groups.items(), key=lambda item: (item[0][0], order[item[0][1]], item[0][2])
        )
    ]


def repeated(found: Sequence[Point]) -> list[Point]:
    """Return the points that were measured in as many rounds as any of the same backend and loop.

    The others are rates that the search for a knee tried, or what an early end left. Where less than three of a
    line were repeated, all of it is returned.
    """
    lines: dict[tuple[str, str], list[Point]] = {}
    for point in found:
        lines.setdefault((point.backend, point.load.loop), []).append(point)
    kept: set[tuple[str, OfferedLoad, bool]] = set()
    for line in lines.values():
        most = max(len(point.runs) for point in line)
        often = [point for point in line if len(point.runs) == most]
        shown = often if len(often) >= FEWEST_POINTS else line
        kept |= {(point.backend, point.load, point.is_search) for point in shown}
    return [point for point in found if (point.backend, point.load, point.is_search) in kept]


def held(evidence: Evidence) -> dict[str, Point]:
    """Return for each backend the point at which the backends differ most clearly and none is overloaded.

    It is the highest rate at which every backend fails next to nothing and has a median p99 within the objective,
    among those that were measured in most rounds and that the backend holds. If no rate is common to all, it is each
    one's own highest such rate; for a backend that has none, its closed loop with the most users.
    """
    most = {knee.backend: knee.rate_per_s or math.inf for knee in evidence.knees}
    candidates: dict[str, list[Point]] = {}
    for point in repeated(points(evidence)):
        p99 = point.spread(p99_ms)
        if p99 is None or point.failed_share > FAILED_SHARE:
            continue
        is_held = p99.median <= evidence.objective_ms and point.load.amount <= most.get(point.backend, math.inf)
        if point.load.loop == "closed" or is_held:
            candidates.setdefault(point.backend, []).append(point)
    candidates = {name: _in_most_rounds(each) for name, each in candidates.items()}
    loads = [{point.load for point in each if point.load.loop == "open"} for each in candidates.values()]
    common = max(set.intersection(*loads), default=None) if len(loads) == len(evidence.backends) else None
    return {
        name: max((point for point in each if common in (None, point.load)), key=lambda point: point.load)
        for name, each in candidates.items()
    }


def _in_most_rounds(found: list[Point]) -> list[Point]:
    """Return the closed loops, and of the rates those that were measured in most rounds."""
    rounds = max((point.rounds for point in found if point.load.loop == "open"), default=0)
    return [point for point in found if point.load.loop == "closed" or point.rounds == rounds]


def p99_ms(run: Run) -> float | None:
    """Return a run's p99 in milliseconds; None where nothing was answered."""
    return None if run.latency_ms is None else run.latency_ms.p99


def p50_ms(run: Run) -> float | None:
    """Return a run's median in milliseconds; None where nothing was answered."""
    return None if run.latency_ms is None else run.latency_ms.p50


def has_percentile(run: Run, part: float) -> bool:
    """Whether enough requests were answered for a percentile; `part` is its share, such as 0.99."""
    return run.answered * (1 - part) >= FEWEST_ABOVE - 1e-9


def mean_batch_rows(run: Run) -> float | None:
    """Return the rows of the batch that a request was in, mean over the requests; None where nothing was answered."""
    total = sum(run.batch_rows.values())
    return sum(int(rows) * count for rows, count in run.batch_rows.items()) / total if total else None


def request_of(evidence: Evidence) -> str:
    """Return how large each request was."""
    return "1 row a request" if evidence.rows == 1 else f"{evidence.rows} rows a request"


def number(value: float) -> str:
    """Return a figure as text, to three digits, or to the unit from 100 on."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    digits = next(digits for digits, least in enumerate((9.995, 0.9995, 0.09995, 0.0), start=1) if abs(value) >= least)
    return f"{value:.{digits}f}"
