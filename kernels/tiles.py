"""Tiles of the matrix kernels: from a table per architecture, else a default computed from dtype and row count.

`tiles/ARCH.json` lists entries, each for an op, a dtype, a range of rows and two widths (null: any). An entry's source
says whether the tile is "computed", reasoned from shapes, or "measured" by ``python -m kernels tune`` on a GPU. An
entry for rms_gated_linear also says whether that was faster there than a norm and a gated_linear: see `is_norm_folded`.

Every default compiles without spilling for sm_80, sm_90, sm_100 and gfx942, and its stages fit the shared memory a
program may have there and on sm_86 and sm_89: 64 KiB on gfx942, 99 KiB on the smallest of the others.
"""

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.dtypes import DTYPES
from kernels.interpreter import rounded
from kernels.names import OPS
from kernels.operands import INTERPRETED_MULTIPROCESSORS, multiprocessor_count, takes_tma

TABLES = Path(__file__).with_suffix("")
SOURCES = ("computed", "measured")

# Programs run eight rows of tiles at a time, so that both operands' tiles are found in L2.
GROUP_M = 8

# Parts of K are at least this many steps long, so that loads overlap and sums through memory stay a small share.
FEWEST_STEPS = 4


class Tile(NamedTuple):
    """What one program computes, (block_m, block_n) in steps of block_k, and how it is compiled and fed.

    Fed by "pointers", a program computes one tile. Fed by "tma", the copy engine of Hopper and later, as many programs
    as there are multiprocessors take one tile after another; widths that the engine cannot read use the computed
    default.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    feed: str = "pointers"

    @property
    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for: its compile-time parameters."""
        return {"BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": GROUP_M}

    @property
    def options(self) -> dict[str, int]:
        """How it is compiled: Triton's own parameters."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def gated_linear_tile(dtype: torch.dtype, rows: int) -> Tile:
    """Choose the tile for `rows` rows; it holds two accumulators and two weight tiles.

    Up to 64 rows there is one row of tiles and the weights' bytes are the cost, so columns are split finely to give
    every multiprocessor some; above, tiles grow to reuse what they load.
    """
    if dtype == torch.float32:  # no matrix instruction keeps its precision, and a tile's products are plain FMAs
        if rows <= 16:
            return Tile(16, 32, 64, 4, 3)
        return Tile(32, 64, 32, 4, 3) if rows <= 64 else Tile(64, 64, 32, 8, 3)
    if rows <= 16:
        return Tile(16, 32, 128, 4, 4)
    if rows <= 32:
        return Tile(32, 32, 128, 8, 3)
    if rows <= 64:
        return Tile(64, 32, 64, 4, 4)
    if rows <= 128:
        return Tile(64, 64, 64, 4, 3)
    return Tile(128, 64, 64, 8, 3)


def rms_gated_linear_tile(dtype: torch.dtype, rows: int) -> Tile:
    """Choose `gated_linear_tile`'s tile, with eight warps if it is wide: with four, squaring x in registers spills."""
    tile = gated_linear_tile(dtype, rows)
    return tile._replace(num_warps=8) if tile.block_n == 64 else tile


def linear_tile(dtype: torch.dtype, rows: int, out_features: int, multiprocessors: int) -> Tile:
    """Choose the tile for (rows, out_features); the largest only if there are enough for half the multiprocessors."""
    if dtype == torch.float32:
        if rows <= 16:
            return Tile(16, 32, 64, 4, 3)
        return Tile(32, 64, 32, 8, 3) if rows <= 64 else Tile(64, 64, 16, 4, 3)
    if rows <= 16:
        return Tile(16, 32, 128, 4, 4)
    if rows <= 32:
        return Tile(32, 32, 64, 4, 6)
    large = Tile(128, 128, 64, 8, 3)
    if triton.cdiv(rows, large.block_m) * triton.cdiv(out_features, large.block_n) < multiprocessors / 2:
        return Tile(64, 64, 64, 4, 4)
    return large


def default_tile(op: str, dtype: torch.dtype, rows: int, out_features: int, multiprocessors: int) -> Tile:
    """Choose the tile for `op`, one of `OPS`, where no table lists one."""
    if op == "linear":
        return linear_tile(dtype, rows, out_features, multiprocessors)
    return gated_linear_tile(dtype, rows) if op == "gated_linear" else rms_gated_linear_tile(dtype, rows)


def split_k(tile: Tile, rows: int, in_features: int, out_features: int, multiprocessors: int) -> int:
    """Choose into how many parts K is split: the largest power of two that gives no multiprocessor two programs.

    One where there are no rows, or the copy engine feeds the tile.
    """
    programs: int = triton.cdiv(rows, tile.block_m) * triton.cdiv(out_features, tile.block_n)
    if programs == 0 or tile.feed == "tma":
        return 1
    steps: int = triton.cdiv(in_features, tile.block_k)
    most = max(1, min(multiprocessors // programs, steps // FEWEST_STEPS))
    return 1 << most.bit_length() - 1


class Entry(NamedTuple):
    """One line of a table.

    Args:
        op: one of `OPS`.
        dtype: of the operands.
        in_features: width it is for; None: any.
        out_features: likewise.
        least_rows: first row count it is for.
        most_rows: last one; None: any above.
        tile: to run with.
        source: "computed" or "measured".
        is_folded: of rms_gated_linear: whether it was measured to be faster than rms_norm and gated_linear, by more
            than the repetitions spread.
    """

    op: str
    dtype: torch.dtype
    in_features: int | None
    out_features: int | None
    least_rows: int
    most_rows: int | None
    tile: Tile
    source: str
    is_folded: bool = False

    def fits(self, rows: int, in_features: int, out_features: int) -> bool:
        """Tell whether the entry is for this shape."""
        is_width = self.in_features in (None, in_features) and self.out_features in (None, out_features)
        return is_width and self.least_rows <= rows and (self.most_rows is None or rows <= self.most_rows)


def read_table(path: Path) -> tuple[Entry, ...]:
    """Read a table.

    Raises:
        ValueError: it is no JSON list, or an entry has an unknown or missing key or a wrong value.
    """
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, list):
        raise ValueError(f"{path}: must be a list of entries, got {type(values).__name__}")
    return tuple(_entry(f"{path}, entry {at}", value) for at, value in enumerate(values))


# What a measured entry may say besides: on what, with what, and how fast. Nothing reads it but people.
NOTES = {
    "device": str,
    "torch": str,
    "triton": str,
    "microseconds": float,
    "spread_microseconds": list,
    "separate_microseconds": float,
    "separate_spread_microseconds": list,
    "rows_measured": int,
}
SIZES = ("block_m", "block_n", "block_k", "num_warps", "num_stages")
FEEDS = ("pointers", "tma")
KEYS = ("op", "dtype", "in_features", "out_features", "least_rows", "most_rows", "tile", "source")


def _entry(at: str, value: object) -> Entry:
    is_normed = isinstance(value, dict) and value.get("op") == "rms_gated_linear"
    entry = _keys(at, value, (*KEYS, *["is_folded"] * is_normed), tuple(NOTES))
    op = _choice(at, "op", entry["op"], OPS)
    dtype = DTYPES[_choice(at, "dtype", entry["dtype"], tuple(DTYPES))]
    widths = [_size(at, name, entry[name], may_be_null=True) for name in ("in_features", "out_features")]
    least_rows = _size(at, "least_rows", entry["least_rows"]) or 0
    most_rows = _size(at, "most_rows", entry["most_rows"], may_be_null=True)
    if most_rows is not None and most_rows < least_rows:
        raise ValueError(f"{at}: most_rows must be {least_rows} (least_rows) or more, got {most_rows}")
    values = dict(_keys(f"{at}, tile", entry["tile"], SIZES, ("feed",)))
    feed = _choice(f"{at}, tile", "feed", values.pop("feed", FEEDS[0]), FEEDS)
    sizes = {name: _size(f"{at}, tile", name, size) or 0 for name, size in values.items()}
    tile = Tile(**sizes, feed=feed)
    for name, size in sizes.items():
        if name != "num_stages" and size & (size - 1):
            raise ValueError(f"{at}, tile: {name} must be a power of two, got {size}")
        if name.startswith("block_") and size < 16:
            raise ValueError(f"{at}, tile: {name} must be 16 or more, got {size}")
    for name, kind in NOTES.items():
        if name in entry and not isinstance(entry[name], kind):
            raise ValueError(f"{at}: {name} must be {kind.__name__}, got {entry[name]!r}")
    source = _choice(at, "source", entry["source"], SOURCES)
    is_folded = entry.get("is_folded", False)
    if not isinstance(is_folded, bool):
        raise ValueError(f"{at}: is_folded must be true or false, got {is_folded!r}")
    if is_folded and source != "measured":
        raise ValueError(f"{at}: is_folded must be false where source is {source!r}: what is not measured is not used")
    return Entry(op, dtype, widths[0], widths[1], least_rows, most_rows, tile, source, is_folded)


def _keys(at: str, value: object, required: Sequence[str], optional: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{at}: must be an object, got {value!r}")
    for name in required:
        if name not in value:
            raise ValueError(f"{at}: {name} is missing")
    for name in value:
        if name not in required and name not in optional:
            raise ValueError(f"{at}: unknown key {name!r}, expected {', '.join(required)}")
    return value


def _choice(at: str, name: str, value: object, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{at}: {name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def _size(at: str, name: str, value: object, may_be_null: bool = False) -> int | None:
    if value is None and may_be_null:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{at}: {name} must be a whole number above zero{' or null' * may_be_null}, got {value!r}")
    return value


@cache
def table(arch: str) -> tuple[Entry, ...]:
    """Return the table of `arch`, without entries where none is shipped. Raises as `read_table` does."""
    path = TABLES / f"{arch}.json"
    return read_table(path) if path.exists() else ()


@lru_cache(maxsize=65536)
def listed_tile(
    op: str, arch: str | None, dtype: torch.dtype, rows: int, in_features: int, out_features: int
) -> Tile | None:
    """Return the tile that the table of `arch` lists for this shape, or None where the computed default is to be taken.

    The first entry that fits wins; `python -m kernels tune` writes its own before others. Raises as `read_table` does.
    """
    entry = _listed(op, arch, dtype, rows, in_features, out_features)
    return None if entry is None else entry.tile


def choose_tile(op: str, x: Tensor, *weights: Tensor) -> Tile:
    """Choose the tile for `op`, one of `OPS`, of x, (rows, in), and weights, (out, in): the listed one that can be fed.

    Where the table lists none, or the copy engine cannot read one of the operands, it is the default. Raises as
    `read_table` does.
    """
    (rows, in_features), out_features = x.shape, weights[0].shape[0]
    tile = listed_tile(op, arch_of(x.device), x.dtype, rows, in_features, out_features)
    if tile is None or (tile.feed == "tma" and not takes_tma(x, *weights)):
        return default_tile(op, x.dtype, rows, out_features, multiprocessor_count(x))
    return tile


def is_norm_folded(arch: str | None, dtype: torch.dtype, rows: int, in_features: int, out_features: int) -> bool:
    """Tell whether rms_gated_linear was measured to beat rms_norm and gated_linear; false where nothing is listed.

    Raises as `read_table` does.
    """
    entry = _listed("rms_gated_linear", arch, dtype, rows, in_features, out_features)
    return entry is not None and entry.is_folded


def is_measured(op: str, arch: str | None, dtype: torch.dtype, rows: int, in_features: int, out_features: int) -> bool:
    """Tell whether the tile that the table of `arch` lists for this shape was measured. Raises as `read_table` does."""
    entry = _listed(op, arch, dtype, rows, in_features, out_features)
    return entry is not None and entry.source == "measured"


def _listed(
    op: str, arch: str | None, dtype: torch.dtype, rows: int, in_features: int, out_features: int
) -> Entry | None:
    fitting = (
        entry
        for entry in (() if arch is None else table(arch))
        if (entry.op, entry.dtype) == (op, dtype) and entry.fits(rows, in_features, out_features)
    )
    return next(fitting, None)


def forget_tables() -> None:
    """Have the tables read again at their next use, since their files have changed."""
    table.cache_clear()
    listed_tile.cache_clear()


@cache
def arch_of(device: torch.device) -> str | None:
    """Name the architecture of a GPU as the tables do, "sm_90" or "gfx942"; None for any other device."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def shipped(op: str, dtype: torch.dtype, arch: str) -> list[Tile]:
    """List the tiles that `op`, one of `OPS`, may run with in `dtype` on `arch`, each once."""
    rows = (1, 17, 33, 65, 129, 65536)
    multiprocessors = INTERPRETED_MULTIPROCESSORS  # any count: by 65,536 rows every tile has been chosen
    defaults = (default_tile(op, dtype, each, 4096, multiprocessors) for each in rows)
    listed = (entry.tile for entry in table(arch) if (entry.op, entry.dtype) == (op, dtype))
    return list(dict.fromkeys((*defaults, *listed)))


@triton.jit  # type: ignore[untyped-decorator]
def tile_of_program(
    program: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Give the row and the column of tiles that `program` computes, `GROUP` rows of tiles at a time."""
    in_group = GROUP * tl.cdiv(N, BLOCK_N)
    first = program // in_group * GROUP
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first, GROUP)
    return first + program % in_group % height, program % in_group // height


@triton.jit  # type: ignore[untyped-decorator]
def store_tile(
    tile: tl.tensor,  # (rows, columns) float32
    out_ptr: tl.tensor,  # (M, N)
    out_stride_m: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
) -> None:
    """Round a tile to the result's dtype and write what of it lies inside."""
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    out = rounded(tile, out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * out_stride_m + columns[None, :], out, mask=mask)
