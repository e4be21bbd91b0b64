"""How a load changes over time: the share of its peak at each share of its duration."""

from collections.abc import Callable

Profile = Callable[[float], float]


def steady(_: float) -> float:
    """The peak throughout."""
    return 1.0


def ramp(part: float) -> float:
    """From nothing to the peak."""
    return part


def spike(part: float) -> float:
    """A fifth of the peak, and the peak itself from two fifths to three."""
    return 1.0 if 0.4 <= part < 0.6 else 0.2


PROFILES: dict[str, Profile] = {"steady": steady, "ramp": ramp, "spike": spike}
