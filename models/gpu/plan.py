"""What is measured, and the engines for it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models.config import FFNConfig, InitConfig, ModelConfig, NormConfig

if TYPE_CHECKING:
    from models.engine import Engine


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: one shape is (dim, hidden, depth); the first one is profiled, at `profile_rows`."""

    shapes: tuple[tuple[int, int, int], ...]
    rows: tuple[int, ...]
    profile_rows: int
    repetitions: int
    backends: tuple[str, ...]


PLANS = {
    "cuda": Plan(
        shapes=((768, 3072, 4), (4096, 14336, 1)),
        rows=(1, 8, 32, 128, 512, 2048, 8192),
        profile_rows=8192,
        repetitions=31,
        backends=("eager", "compiled", "fused"),
    ),
    "cpu": Plan(shapes=((32, 48, 2),), rows=(1, 8), profile_rows=8, repetitions=2, backends=("eager", "fused")),
}


def ready_engine(
    plan: Plan, path: Path, device: str, dtype: str, rows: Sequence[int] = ()
) -> tuple["Engine", str | None]:
    """Load a model with the backends that run here, ready for only these row counts; say which do not run.

    A warm-up would compile every bucket up to the largest, and on a GPU that takes minutes.
    """
    import torch

    from models.engine import load_engine

    asked = load_engine(path, device, dtype, plan.backends)
    absent = [f"{name} ({status.reason})" for name, status in asked.backends.items() if status.reason is not None]
    able = [name for name, status in asked.backends.items() if status.reason is None]
    engine = load_engine(path, device, dtype, able) if absent else asked
    for count in sorted(rows or plan.rows, reverse=True):  # the largest first: what is larger is run in parts
        for name in able:
            engine.run(torch.zeros(count, engine.config.width_in), name)
    return engine, f"done without {', '.join(absent)}" if absent else None


def config_of(dim: int, hidden: int, depth: int) -> ModelConfig:
    """Return a GEGLU (tanh) stack with seeded weights, as the reference shape is."""
    ffn, norm = FFNConfig(True, "gelu_tanh"), NormConfig("rms")
    return ModelConfig(f"geglu-{dim}x{hidden}x{depth}", dim, hidden, depth, ffn, norm, init=InitConfig(0))


def write_model(directory: Path, shape: tuple[int, int, int]) -> Path:
    """Write a model directory and return its path."""
    config = config_of(*shape)
    path = directory / config.name
    path.mkdir()
    config.save(path)
    return path
