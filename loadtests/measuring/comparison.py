"""Loads the backends of one server in interleaved rounds, and records the evidence.

Rounds go A B C, B C A, C A B, each backend with the same arrivals and rows, so that disturbances of the host affect all
alike, and none always runs behind the same other.
First comes a closed loop at each number of users, which gives the first rate for the search; then the search for the
highest rate that holds, one step at a time for all backends; then an open loop at each rate, below the knee and beyond
it.
"""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

from loadtests.evidence import Evidence, Run
from loadtests.generator.load import Load
from loadtests.measuring.knee import MOST_TRIES, Search, after, knee
from loadtests.measuring.measurement import Measurement, seconds_for

SHARES = (0.25, 0.5, 0.75, 0.9)  # of the knee, or of what the closed loop reached
BEYOND = (1.2, 2.0)  # of the same: what becomes of goodput past the knee
HELD_SHARE = 0.99  # of what was due, answered within the objective: then the p99 is within it
FIRST_SHARE = 0.6  # of what the closed loop reached: tried first
MOST_REPEATS = 3  # of a step in which the generator was the bottleneck


@dataclass(frozen=True, slots=True)
class Plan:
    """What a comparison is made of."""

    rows: int
    users: list[int]
    rates_per_s: list[float] | None  # None: shares of each backend's knee, and beyond it
    has_knee: bool
    rounds: int
    seconds: float
    warm_up_s: float
    max_in_flight: int

    def least_s(self, backends: int) -> float:
        """Return the least time it can take, in seconds: what is known beforehand, and two search steps per round."""
        rates = len(SHARES) + len(BEYOND) if self.rates_per_s is None else len(self.rates_per_s)
        runs = len(self.users) + rates + 2 * self.has_knee
        return self.rounds * runs * backends * (self.warm_up_s + self.seconds)


class Comparison:
    """Carries out a plan, and adds to the evidence as it goes."""

    def __init__(self, measurement: Measurement, evidence: Evidence, plan: Plan) -> None:
        self._measurement = measurement
        self._evidence = evidence
        self._plan = plan

    def run(self) -> None:
        """Measure all of it.

        Raises:
            LoadTestError: a wrong answer, or a server that stopped answering.
        """
        backends = list(self._evidence.backends)
        reached = self._closed(backends)
        bounds = self._search(backends, reached) if self._plan.has_knee else reached
        self._open(backends, bounds)

    def _closed(self, backends: list[str]) -> dict[str, float]:
        """Return the requests a second that each backend reached, medians of rounds at its best number of users."""
        reached: dict[str, dict[int, list[float]]] = {backend: {} for backend in backends}
        steps = [(number, users) for number in range(self._plan.rounds) for users in self._plan.users]
        with progress("closed loop", len(steps) * len(backends)) as advance:
            for number, users in steps:
                for backend in turned(backends, number):
                    load = self._load(backend, "closed", f"{users} users", (number,), users=users)
                    run = self._measure(load, number)
                    reached[backend].setdefault(users, []).append(run.answered_per_s)
                    advance()
        return {name: max(statistics.median(each) for each in found.values()) for name, found in reached.items()}

    def _search(self, backends: list[str], reached: dict[str, float]) -> dict[str, float]:
        """Return the rate that each backend holds, or where there is none what it reached in the closed loop."""
        rounds: list[dict[str, Search]] = []
        with progress("knee", None) as advance:
            for number in range(self._plan.rounds):
                searches = {
                    name: after(rounds[-1][name]) if rounds else Search(max(1.0, FIRST_SHARE * reached[name]))
                    for name in backends
                }
                rounds.append(searches)
                for _ in range(MOST_TRIES):
                    for backend in turned(backends, number):
                        if not searches[backend].is_over:
                            self._try(backend, searches[backend], number)
                            advance()
        self._evidence.knees = [knee(name, [each[name] for each in rounds]) for name in backends]
        return {each.backend: each.rate_per_s or reached[each.backend] for each in self._evidence.knees}

    def _try(self, backend: str, search: Search, number: int) -> None:
        """Try a rate; try again if it failed and the generator was the bottleneck, perhaps because of the host.

        A rate that holds although the generator was late would hold otherwise, too.
        """
        for _ in range(MOST_REPEATS):
            load = self._arrivals(backend, search.rate_per_s, number)
            run = self._measure(load, number, is_search=True)
            if run.invalid is None or has_held(run):
                search.tell(has_held(run))
                return
        search.give_up(str(run.invalid))

    def _open(self, backends: list[str], bounds: dict[str, float]) -> None:
        def rates(backend: str) -> list[float]:
            return self._plan.rates_per_s or [share * bounds[backend] for share in (*SHARES, *BEYOND)]

        beyond = [] if self._plan.rates_per_s is None or not self._plan.has_knee else list(BEYOND)
        steps = len(rates(backends[0])) + len(beyond)
        with progress("open loop", self._plan.rounds * steps * len(backends)) as advance:
            for number in range(self._plan.rounds):
                for step in range(steps):
                    for backend in turned(backends, number):
                        all_rates = [*rates(backend), *(share * bounds[backend] for share in beyond)]
                        load = self._arrivals(backend, all_rates[step], number, self._plan.rates_per_s is not None)
                        self._measure(load, number)
                        advance()

    def _arrivals(self, backend: str, rate_per_s: float, number: int, is_given: bool = False) -> Load:
        """Return an open loop; one whose rate nobody gave takes longer where it would have too few requests."""
        seconds = self._plan.seconds if is_given else seconds_for(rate_per_s, self._plan.seconds)
        label = f"{rate_per_s:.4g}/s"
        return self._load(backend, "open", label, (number,), rate_per_s=rate_per_s, seconds=seconds)

    def _load(
        self,
        backend: str,
        loop: str,
        label: str,
        seed: tuple[int, ...],
        users: int = 0,
        rate_per_s: float = 0.0,
        seconds: float | None = None,
    ) -> Load:
        return Load(
            kinds=((backend, self._plan.rows),),
            loop=loop,
            label=label,
            warm_up_s=self._plan.warm_up_s,
            seconds=self._plan.seconds if seconds is None else seconds,
            seed=(self._evidence.seed, *seed),
            users=users,
            rate_per_s=rate_per_s,
            max_in_flight=self._plan.max_in_flight,
        )

    def _measure(self, load: Load, number: int, is_search: bool = False) -> Run:
        return self._measurement.run(load, number, is_search)


def turned(backends: list[str], number: int) -> list[str]:
    """Return the backends in the order of a round: each round begins with another."""
    turn = number % len(backends)
    return backends[turn:] + backends[:turn]


def has_held(run: Run) -> bool:
    """Whether the p99 of all that was due is within the objective; what failed counts as beyond it."""
    return run.due > 0 and run.answered_in_time >= HELD_SHARE * run.due


@contextmanager
def progress(what: str, count: int | None) -> Iterator[Callable[[], object]]:
    """Show a bar on stderr."""
    with tqdm(total=count, desc=what, unit="run") as bar:
        yield bar.update
