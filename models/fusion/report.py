"""What fusing did to a model: each block that was swapped, and each that was left alone, with the reason."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Swapped:
    """A block that is fused.

    Attributes:
        name: as in ``named_modules``.
        kind: the class it had.
        activation: None for an output.
        implementation: "onednn" or "triton".
        copied_bytes: bytes of the weights that are held a second time, in the layout the kernels need.
    """

    name: str
    kind: str
    activation: str | None
    implementation: str
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A block that is not fused, and why: `reason` is one sentence without a full stop."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class FuseReport:
    """What `fuse` did; printed, it has a line for each block."""

    swapped: tuple[Swapped, ...]
    left_alone: tuple[LeftAlone, ...]

    @property
    def copied_bytes(self) -> int:
        """Bytes of all the weights that are held a second time."""
        return sum(it.copied_bytes for it in self.swapped)

    def __str__(self) -> str:
        lines = [
            f"swapped {len(self.swapped)}, left alone {len(self.left_alone)}; "
            f"{self.copied_bytes / 2**20:.1f} MiB of weights are held a second time"
        ]
        lines += [
            f"  {it.name or 'the module'} ({it.kind}): {it.implementation}, {it.activation or 'with the residual'}, "
            f"{it.copied_bytes / 2**20:.1f} MiB"
            for it in self.swapped
        ]
        if not self.swapped and not self.left_alone:
            lines.append(
                "  no feed-forward block was recognised; models/fusion/patterns.py has the names that are known"
            )
        lines += [f"  {it.name or 'the module'} ({it.kind}): left alone, {it.reason}" for it in self.left_alone]
        return "\n".join(lines)
