"""A comparison in a terminal: its sentences, the search for each knee, and each backend's figures under each load."""

from collections.abc import Callable

from loadtests.evidence import Evidence, Knee, Run
from loadtests.report.points import Point, number, p50_ms, p99_ms, points, repeated
from loadtests.report.summary import knees_of, least_of, summary, why_least

FIGURES: dict[str, Callable[[Run], float | None]] = {
    "requests/s": lambda run: run.answered_per_s,
    "p50 ms": p50_ms,
    "p99 ms": p99_ms,
}


def lines(evidence: Evidence) -> list[str]:
    """Return the lines that a terminal shows."""
    found = knees_of(evidence) | least_of(evidence)
    return [
        *summary(evidence),
        "",
        *(held(evidence, knee, knee.backend in found) for knee in evidence.knees),
        *table(repeated(points(evidence))),
    ]


def held(evidence: Evidence, knee: Knee, has_figure: bool) -> str:
    """Return what the search for one backend's knee found, which is no figure where no run of it counts."""
    if not has_figure:
        return f"{knee.backend}: no rate was found: {knee.note or 'no run of it counts'}"
    if knee.rate_per_s is not None:
        extremes = f"{number(min(knee.rounds_per_s))} to {number(max(knee.rounds_per_s))}"
        rate = f"{number(knee.rate_per_s)} requests a second (rounds {extremes})"
        return f"{knee.backend}: p99 within {evidence.objective_ms:g} ms up to {rate}"
    least = f"holds at least {number(knee.at_least_per_s or 0)} a second"
    return f"{knee.backend}: {least} ({why_least(evidence, knee)})"


def table(found: list[Point]) -> list[str]:
    """Return the medians over the rounds that count, under a heading; none where nothing was measured."""
    if not found:
        return []
    form = "{:<10} {:<18} {:>10} {:>9} {:>9}"
    rows = [form.format("backend", "load", *FIGURES)]
    for point in found:
        spreads = (point.spread(figure) for figure in FIGURES.values())
        told = ["-" if spread is None else number(spread.median) for spread in spreads]
        note = "  tried in the search" if point.is_search else ""
        note += "" if point.counted else "  no round counts"
        note += f"  {point.failed_share:.1%} not answered" if point.failed_share else ""
        rows.append(form.format(point.backend, str(point.load), *told) + note)
    return rows
