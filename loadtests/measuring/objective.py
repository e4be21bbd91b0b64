"""The objectives of a scenario, and whether it met them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """One objective; `got` None: it could not be measured, which is no pass."""

    what: str
    unit: str
    got: float | None
    limit: float
    is_floor: bool = False  # at least the limit, instead of at most

    @property
    def has_passed(self) -> bool:
        """Whether the objective was met."""
        if self.got is None:
            return False
        return self.got >= self.limit if self.is_floor else self.got <= self.limit


def table(verdicts: list[Verdict]) -> str:
    """Return the verdicts as lines of text under a heading."""
    lines = [("objective", "wanted", "got", "")]
    for each in verdicts:
        sign = ">=" if each.is_floor else "<="
        got = "not measured" if each.got is None else f"{each.got:.4g} {each.unit}".rstrip()
        wanted = f"{sign} {each.limit:.4g} {each.unit}".rstrip()
        lines.append((each.what, wanted, got, "pass" if each.has_passed else "FAIL"))
    widths = [max(len(line[column]) for line in lines) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
