"""Scenarios by name: what is sent, as a share of the peak over time."""

from dataclasses import dataclass

MIXED_ROWS = (1, 4, 16, 64)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One named load."""

    what: str
    seconds: float  # where none are asked for
    profile: str = "steady"  # of loadtests/generator/load_profile.py
    mixes_backends: bool = False
    mixes_rows: bool = False
    watches_memory: bool = False

    def kinds(self, backends: list[str], rows: int) -> tuple[tuple[str, int], ...]:
        """Return the backend and the rows of each kind of request, in equal parts."""
        chosen = backends if self.mixes_backends else backends[:1]
        sizes = [rows * each for each in MIXED_ROWS] if self.mixes_rows else [rows]
        return tuple((backend, size) for backend in chosen for size in sizes)


SCENARIOS = {
    "steady": Scenario("the peak throughout", 30),
    "ramp": Scenario("from nothing to the peak", 60, profile="ramp"),
    "spike": Scenario("a fifth of the peak, and for a fifth of the time the peak itself", 60, profile="spike"),
    "overload": Scenario("capacity found, then three times as much", 60, watches_memory=True),
    "mixed-backends": Scenario("requests to every backend in one stream", 30, mixes_backends=True),
    "mixed-rows": Scenario(
        f"requests of {', '.join(map(str, MIXED_ROWS))} times --rows in one stream", 30, mixes_rows=True
    ),
    "soak": Scenario("the peak for ten minutes, with an eye on the server's memory", 600, watches_memory=True),
}
