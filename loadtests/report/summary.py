"""What a comparison says, in three sentences: what each backend holds, whether fusing pays, which runs count.

All of it is derived from the document; nothing is claimed that the spread over the rounds does not support.
"""

import math
import re
from dataclasses import dataclass

from loadtests.evidence import Evidence, Knee
from loadtests.measuring.knee import WITHIN
from loadtests.report.points import OfferedLoad, Spread, fault, number, points

STEP = WITHIN - 1  # how closely the search for a knee looks
REASONS = 3  # that are told; the table of runs has all
FEWEST_ROUNDS = 3  # that support a verdict: repeats of a single round contradict each other
LATE = re.compile(r"1% of the requests left more than (.+) ms late, and (.+) ms is allowed")
FIGURE = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of the loads that two backends carry, with the extremes over the rounds."""

    value: float
    low: float
    high: float
    rounds: int

    @property
    def is_tie(self) -> bool:
        """True where the extremes lie on both sides of 1, or the difference is finer than the search's step."""
        return self.low <= 1 <= self.high or abs(self.value - 1) <= STEP

    @property
    def tie(self) -> str:
        """What makes a tie one."""
        return (
            "within the spread" if self.low <= 1 <= self.high else f"within the {STEP:.0%} that the search leaves open"
        )

    @property
    def spread(self) -> str:
        """The extremes in words."""
        return f"{self.low:.2f} to {self.high:.2f} over {self.rounds} rounds" if self.rounds > 1 else "one round"


def summary(evidence: Evidence) -> tuple[str, str, str]:
    """Return the three sentences."""
    return capacity(evidence), worth(evidence), standing(evidence)


def capacity(evidence: Evidence) -> str:
    """Say which rate each backend holds."""
    if not any(fault(run) is None for run in evidence.runs):
        return "No figure can be given, since there is no run that counts."
    within = f"99 of 100 requests answered within {evidence.objective_ms:g} ms"
    knees, least = knees_of(evidence), least_of(evidence)
    noted = {knee.backend: knee for knee in evidence.knees}
    held = [f"{name} {_rate(knee, is_first=not place)}" for place, (name, knee) in enumerate(knees.items())]
    held += [
        f"{name} {_least(evidence, knee, is_first=not (knees or place))}"
        for place, (name, knee) in enumerate(least.items())
    ]
    clauses = [f"with {within}, {_listed(held)}"] if held else []
    such = "such rate" if held else f"rate with {within}"
    missing = [name for name in evidence.backends if name in noted and name not in knees | least]
    unsearched = [name for name in evidence.backends if name not in noted]
    if missing:
        reasons = [f"{name} ({noted[name].note or 'no run of it counts'})" for name in missing]
        clauses.append(f"no {such} was found for {_listed(reasons)}")
    if unsearched:
        clauses.append(f"no {such} was searched for {_listed(unsearched)}")
    return f"{_capital('; '.join(clauses))}."


def worth(evidence: Evidence) -> str:
    """Say whether fusing pays against each other backend."""
    if "fused" not in evidence.backends or len(evidence.backends) < 2:
        return "Whether fusing pays was not measured: it takes fused and another backend."
    clauses: list[str] = []
    without: list[str] = []
    by_users: OfferedLoad | None = None
    noted = {knee.backend for knee in evidence.knees}
    for other in evidence.backends:
        if other == "fused":
            continue
        ratio = knee_ratio(evidence, "fused", other)
        basis = "the rate"
        if ratio is None:
            found = throughput_ratio(evidence, "fused", other)
            if found is None:
                without.append(other)
                continue
            ratio, by_users = found
            basis = f"the replies a second to {by_users}"
        figures = f"{ratio.value:.2f} times {basis} ({ratio.spread})"
        start = len(clauses)
        if ratio.rounds < FEWEST_ROUNDS:
            clauses.append(
                f"whether fusing pays against {other} cannot be said from {_rounds(ratio.rounds)}{_of_made(evidence)}, "
                f"with {ratio.value:.2f} times {basis}; {_more_rounds(evidence)}"
            )
        elif ratio.is_tie:
            clauses.append(f"fused and {other} tie {ratio.tie}, with {figures}")
        elif ratio.value > 1:
            clauses.append(f"fusing pays against {other}, with {figures}")
        else:
            clauses.append(f"fusing does not pay against {other}, with {figures}")
        unknown = [name for name in ("fused", other) if name in noted and name not in knees_of(evidence)]
        if unknown and ratio.rounds >= FEWEST_ROUNDS:
            clauses[start] = (
                f"whether fusing pays against {other} is undecided, since no knee was found for {_listed(unknown)}; "
                f"of the closed loop only: {clauses[start]}"
            )
    if without:
        clauses.append(
            f"whether fusing pays against {_listed(without)} cannot be said, for want of runs that count on both sides"
        )
    return f"{_capital('; '.join(clauses))}."


def standing(evidence: Evidence) -> str:
    """Say how many runs count, why others do not, what the checked replies were, and whether all is there."""
    total = len(evidence.runs)
    reasons_of_runs = [reason for run in evidence.runs if (reason := fault(run)) is not None]
    rejected = len(reasons_of_runs)
    faults: dict[str, list[str]] = {}
    for reason in reasons_of_runs:
        faults.setdefault(FIGURE.sub("", reason), []).append(reason)
    often = sorted(faults.values(), key=len, reverse=True)[:REASONS]
    reasons = _listed([f"{_plain(_together(alike))}{_such(alike, rejected)}" for alike in often])
    if len(faults) > REASONS:
        reasons += f", besides {len(faults) - REASONS} other reasons"
    checked, wrong = (sum(getattr(run, name) for run in evidence.runs) for name in ("checked", "wrong"))
    if not total:
        runs = "no run was made"
    elif not rejected:
        runs = f"all {total} runs count"
    elif rejected == total:
        runs = f"none of the {total} runs counts: {reasons}"
    else:
        runs = (
            f"{total - rejected} of {total} runs count; {rejected} {'does' if rejected == 1 else 'do'} not: {reasons}"
        )
    if wrong:
        replies = f"{wrong} of {checked} checked replies were wrong, so that nothing here is to be relied on"
    else:
        replies = f"all {checked} checked replies were right" if checked else "no reply was checked"
    early = f"; it ended early: {evidence.ended_early}" if evidence.ended_early is not None else ""
    return f"{_capital(runs)}, and {replies}{early}."


def knees_of(evidence: Evidence) -> dict[str, Knee]:
    """Return the knees that have a rate, by backend, the highest first; none where no run counts."""
    counted = {run.backend for run in evidence.runs if fault(run) is None}
    found = [knee for knee in evidence.knees if knee.rate_per_s is not None and knee.backend in counted]
    return {knee.backend: knee for knee in sorted(found, key=lambda knee: -(knee.rate_per_s or 0))}


def least_of(evidence: Evidence) -> dict[str, Knee]:
    """Return the knees without a rate but with a known lower bound, by backend, the highest first.

    None where no run counts, as for `knees_of`.
    """
    counted = {run.backend for run in evidence.runs if fault(run) is None}
    found = [
        knee
        for knee in evidence.knees
        if knee.rate_per_s is None and knee.at_least_per_s is not None and knee.backend in counted
    ]
    return {knee.backend: knee for knee in sorted(found, key=lambda knee: -(knee.at_least_per_s or 0))}


def why_least(evidence: Evidence, knee: Knee) -> str:
    """Say why the search of a knee ended at a lower bound, and where it takes that bound from runs that do not count.

    Those held although the generator was at its limit, which makes a latency longer and never shorter.
    """
    why = f"the search could not go on: {knee.note}"
    tried = [
        run
        for run in evidence.runs
        if run.is_search and run.backend == knee.backend and run.rate_per_s == knee.at_least_per_s
    ]
    if tried and all(run.invalid is not None for run in tried):
        why += f"; {number(knee.at_least_per_s or 0)} held although the generator was at its limit"
    return why


def knee_ratio(evidence: Evidence, backend: str, other: str) -> Ratio | None:
    """Compare two knees, each extreme with the opposite one of the other; None if a backend has no knee."""
    knees = knees_of(evidence)
    if backend not in knees or other not in knees:
        return None
    ours, theirs = knees[backend], knees[other]
    value = (ours.rate_per_s or 0) / (theirs.rate_per_s or 1)
    extremes = [
        _quotient(one(ours.rounds_per_s), other(theirs.rounds_per_s))
        for one, other in ((min, max), (max, min))
        if ours.rounds_per_s and theirs.rounds_per_s
    ]
    rounds = min(len(ours.rounds_per_s), len(theirs.rounds_per_s))
    return Ratio(value, min([value, *extremes]), max([value, *extremes]), rounds)


def throughput_ratio(evidence: Evidence, backend: str, other: str) -> tuple[Ratio, OfferedLoad] | None:
    """Compare replies a second by round, at the most users for which both backends have common rounds that count.

    None if there are none.
    """
    counted = {(point.load, point.backend): point for point in points(evidence, "closed") if point.counted}
    for load in sorted({load for load, _ in counted}, reverse=True):
        if (load, backend) not in counted or (load, other) not in counted:
            continue
        ours, theirs = (
            {run.round: run.answered_per_s for run in counted[load, name].counted} for name in (backend, other)
        )
        both = sorted(ours.keys() & theirs.keys())
        if both:
            rounds = [_quotient(ours[each], theirs[each]) for each in both]
            value = _quotient(*(Spread.of(rates[each] for each in both).median for rates in (ours, theirs)))
            return Ratio(value, min(value, *rounds), max(value, *rounds), len(both)), load
    return None


def _quotient(a: float, b: float) -> float:
    if b:
        return a / b
    return math.inf if a else 1.0  # a round in which a backend held nothing


def _rate(knee: Knee, is_first: bool) -> str:
    low, high = min(knee.rounds_per_s, default=0), max(knee.rounds_per_s, default=0)
    rate = f"holds {number(knee.rate_per_s or 0)} requests a second" if is_first else number(knee.rate_per_s or 0)
    rounds = f"{number(low)} to {number(high)}{' over the rounds' if is_first else ''}"
    return f"{rate} ({rounds if len(knee.rounds_per_s) > 1 else 'one round'})"


def _least(evidence: Evidence, knee: Knee, is_first: bool) -> str:
    rate = f"at least {number(knee.at_least_per_s or 0)}"
    told = f"holds {rate} requests a second" if is_first else rate
    return f"{told} ({why_least(evidence, knee)})"


def _rounds(count: int) -> str:
    return f"{count} round{'' if count == 1 else 's'}"


def _rounds_made(evidence: Evidence) -> int:
    return max((run.round + 1 for run in evidence.runs), default=0)


def _of_made(evidence: Evidence) -> str:
    made = _rounds_made(evidence)
    return f" with a figure for both, of {made} that were made" if made >= FEWEST_ROUNDS else ""


def _more_rounds(evidence: Evidence) -> str:
    made = _rounds_made(evidence)
    return f"take --rounds {FEWEST_ROUNDS}" if made < FEWEST_ROUNDS else f"take more --rounds than {made}"


def _together(reasons: list[str]) -> str:
    """Return reasons that differ in figures alone as one, each figure that differs as a range."""
    columns = zip(*(FIGURE.findall(reason) for reason in reasons), strict=True)
    ranges = iter([tuple(dict.fromkeys((min(each, key=float), max(each, key=float)))) for each in columns])
    return FIGURE.sub(lambda _: " to ".join(next(ranges)), reasons[0])


def _plain(reason: str) -> str:
    return LATE.sub(r"the load generator itself fell behind by \1 ms, and \2 ms is allowed", reason)


def _such(alike: list[str], rejected: int) -> str:
    return "" if len(alike) == rejected else f" ({len(alike)} of them)"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
