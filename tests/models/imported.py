"""A checkpoint in memory, read as a whole."""

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from models.checkpoint import Checkpoint
from models.config import ModelConfig


def imported(
    source: Path,
    name: str,
    layers: tuple[int | None, int | None] = (None, None),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a `Checkpoint` and return its config and all its tensors."""
    checkpoint = Checkpoint(source, name, layers)
    return checkpoint.config, dict(checkpoint.tensors(progress))
