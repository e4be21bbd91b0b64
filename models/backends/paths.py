"""Which kernels compute a gated block's hidden layer on a GPU, for each dim, hidden width and bucket of rows.

- ``dual``: one kernel for both products and the gate; it moves the fewest bytes.
- ``library``: PyTorch's own product (cuBLAS) with gate and up stacked, then one pass for the gate.
- ``split``: our product of the stacked gate and up with K split, then the same pass; for so few rows that the other
  kernels leave multiprocessors idle.

paths.json holds what was measured, by device name, dtype, widths and bucket; `default` computes the rest.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from kernels.dtypes import name_of

HiddenPath = Literal["dual", "library", "split"]
FILE = Path(__file__).with_name("paths.json")

# What our dual product is taken to reach of cuBLAS's rate, and how wide its narrowest tile is: assumed, not measured.
ASSUMED_SHARE = 0.8
NARROWEST_TILE = 32
FEW_ROWS = 64


def choose(device: str, dtype: torch.dtype, dim: int, hidden: int, bucket: int, multiprocessors: int) -> HiddenPath:
    """Return what was measured on `device` for these widths and this bucket, else `default`.

    Args:
        device: the GPU's name as PyTorch tells it.
        dtype: of weights and rows.
        dim: width of the residual stream.
        hidden: width inside a block.
        bucket: rows, a power of two.
        multiprocessors: how many the device has.
    """
    measured = table().get(device, {}).get(name_of(dtype), {}).get(f"{dim}x{hidden}", {})
    path: HiddenPath | None = measured.get(str(bucket))
    return default(dtype, dim, hidden, bucket, multiprocessors) if path is None else path


def default(dtype: torch.dtype, dim: int, hidden: int, bucket: int, multiprocessors: int) -> HiddenPath:
    """Choose by the shapes: split if there are too few columns for the multiprocessors, library where the rate decides.

    Above `FEW_ROWS` rows the dual product pays if it reaches 1 / (1 + 272 / dim) of cuBLAS's rate: that weighs the
    bytes it saves against its slower FLOPs, on a GPU of 181 FLOPs per byte. float32 has no matrix instruction that
    keeps its precision; there the library's plain multiply-adds are assumed to win.
    """
    if bucket <= FEW_ROWS:
        return "split" if hidden // NARROWEST_TILE < multiprocessors / 2 else "dual"
    return "dual" if dtype != torch.float32 and 1 / (1 + 272 / dim) <= ASSUMED_SHARE else "library"


@cache
def table() -> dict[str, Any]:
    """Read paths.json.

    Raises:
        ValueError: it holds an unknown path.
    """
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    for device, dtypes in found.items():
        for dtype, widths in dtypes.items():
            for width, rows in widths.items():
                for bucket, path in rows.items():
                    if path not in get_args(HiddenPath):
                        raise ValueError(
                            f"{FILE.name}: {device}, {dtype}, {width}, {bucket} rows: expected one of "
                            f"{', '.join(get_args(HiddenPath))}, got {path!r}"
                        )
    return found


def record(measured: dict[str, Any]) -> None:
    """Put measured paths into paths.json, replacing those of the same device, dtype and widths."""
    found = table()
    for device, dtypes in measured.items():
        for dtype, widths in dtypes.items():
            found.setdefault(device, {}).setdefault(dtype, {}).update(widths)
    FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    table.cache_clear()
