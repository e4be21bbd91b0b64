"""One load: what is sent to the server, how, and for how long."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of each kind in equal parts, in an order that the seed gives."""

    kinds: tuple[tuple[str, int], ...]  # backend and rows of each kind of request
    loop: str  # closed: users of our own; open: arrivals; shape: users that locust's shape brings
    label: str  # what locust's own statistics call it
    warm_up_s: float
    seconds: float  # measured
    seed: tuple[int, ...]
    users: int = 0
    rate_per_s: float = 0.0  # at the profile's peak
    profile: str = "steady"
    max_in_flight: int = 512

    @property
    def connections(self) -> int:
        """The most that it has open at once."""
        return self.max_in_flight if self.loop == "open" else self.users

    def share(self, index: int, processes: int) -> Self:
        """Return the part that one of several generator processes makes."""
        return replace(
            self,
            users=self.users // processes + (index < self.users % processes),
            rate_per_s=self.rate_per_s / processes,
            max_in_flight=max(1, self.max_in_flight // processes),
            seed=(*self.seed, index),
        )

    def message(self) -> dict[str, Any]:
        """Return it as locust's messages carry it."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Self:
        """Return what `message` made."""
        kinds = tuple((backend, rows) for backend, rows in message["kinds"])
        return cls(**message | {"kinds": kinds, "seed": tuple(message["seed"])})
