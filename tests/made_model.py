"""The config of a small model with seeded weights, for every test and program that needs one."""

import json
from pathlib import Path
from typing import Any


def made_fields(name: str, dim: int, hidden: int, depth: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a gated GELU model with RMS norms, without layers at its ends, with some changed."""
    return {
        "name": name,
        "in_features": None,
        "out_features": None,
        "dim": dim,
        "hidden": hidden,
        "depth": depth,
        "ffn": {"gated": True, "activation": "gelu_tanh", "bias": False},
        "norm": {"kind": "rms", "position": "pre", "eps": 1e-6},
        "labels": None,
        "init": {"seed": 0},
    } | changes


def write_made_model(parent: Path, name: str, dim: int, hidden: int, depth: int) -> Path:
    """Write such a model's directory, named as it is, and return its path."""
    directory = parent / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(made_fields(name, dim, hidden, depth)))
    return directory
