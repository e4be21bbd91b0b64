"""Searches for the highest rate that holds, by bracketing and then bisecting it."""

from dataclasses import dataclass, field

from loadtests.evidence import Knee

WITHIN = 1.05  # the ratio of the bracket's ends at which a search is over
COLD_STEP = 1.5
LARGEST_STEP = 2.0
MOST_TRIES = 20
LOWEST_SHARE = 0.01  # of the first rate tried


@dataclass(slots=True)
class Search:
    """One round's search of one backend: asks for rates, and is told whether each held."""

    rate_per_s: float  # tried first
    step: float = COLD_STEP  # ratio of the next rate to it, as long as one end of the bracket is missing
    held_per_s: float | None = None
    above_per_s: float | None = None
    tries: int = 0
    note: str | None = None
    _lowest_per_s: float = field(init=False)

    def __post_init__(self) -> None:
        """Remember where to give up."""
        self._lowest_per_s = max(1.0, self.rate_per_s * LOWEST_SHARE)

    @property
    def is_over(self) -> bool:
        """Whether the bracket is narrow enough, or a note says why it never will be."""
        if self.note is not None:
            return True
        return bool(self.held_per_s and self.above_per_s and self.above_per_s / self.held_per_s < WITHIN + 1e-9)

    def tell(self, has_held: bool) -> None:
        """Say whether `rate_per_s` held, which sets the next one."""
        self.tries += 1
        if has_held:
            self.held_per_s = self.rate_per_s
        else:
            self.above_per_s = self.rate_per_s
        if self.held_per_s and self.above_per_s:
            self.rate_per_s = (self.held_per_s * self.above_per_s) ** 0.5
        else:
            self.rate_per_s *= self.step if has_held else 1 / self.step
            self.step = min(self.step**2, LARGEST_STEP)
        if self.is_over:
            return
        if self.rate_per_s < self._lowest_per_s:
            self.note = f"not even {self.above_per_s:.3g} requests a second held"
        elif self.tries >= MOST_TRIES:
            self.note = f"no bracket within {WITHIN - 1:.0%} after {self.tries} rates"

    def give_up(self, reason: str) -> None:
        """End the search: the generator ended first."""
        rate = f"{self.rate_per_s:.4g}" if self.rate_per_s < 1000 else f"{self.rate_per_s:.0f}"
        self.note = f"at {rate} a second {reason}"


def after(previous: Search) -> Search:
    """Return the next round's search of the same backend, which begins where the last one ended."""
    if previous.held_per_s is None or previous.note is not None:
        return Search(previous.held_per_s or previous.rate_per_s)
    return Search(previous.held_per_s, step=WITHIN)


def knee(backend: str, searches: list[Search]) -> Knee:
    """Return the result of all rounds: the bracket of the median round, or of the lower of two medians."""
    rounds = sorted(
        (search.held_per_s, search.above_per_s)
        for search in searches
        if search.note is None and search.held_per_s is not None and search.above_per_s is not None
    )
    if not searches:
        return Knee(backend, None, None, [], "no round was measured")
    if len(rounds) * 2 <= len(searches):
        middle = sorted(searches, key=lambda search: search.held_per_s or 0.0)[(len(searches) - 1) // 2]
        note = middle.note or f"in another round, {next(search.note for search in searches if search.note is not None)}"
        return Knee(backend, None, None, [held for held, _ in rounds], note, middle.held_per_s)
    held, above = rounds[(len(rounds) - 1) // 2]
    return Knee(backend, held, above, [each for each, _ in rounds], None)
