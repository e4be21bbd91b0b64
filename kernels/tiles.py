"""Tiles of the matrix kernels: a computed default for each dtype and row count, reasoned from shapes and not measured.

Every default compiles without spilling for sm_80, sm_90 and gfx942, and its stages fit the shared memory a program may
have there and on sm_86 and sm_89: 64 KiB on gfx942, 99 KiB on the smallest of the others.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

# Programs run eight rows of tiles at a time, so that both operands' tiles are found in L2.
GROUP_M = 8

# Parts of K are at least this many steps long, so that loads overlap and sums through memory stay a small share.
FEWEST_STEPS = 4


class Tile(NamedTuple):
    """What one program computes, (block_m, block_n) in steps of block_k, and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


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
        return Tile(32, 32, 128, 4, 3)
    if rows <= 64:
        return Tile(64, 32, 64, 4, 4)
    if rows <= 128:
        return Tile(64, 64, 64, 4, 3)
    return Tile(128, 64, 64, 8, 3)


def linear_tile(dtype: torch.dtype, rows: int, out_features: int, multiprocessors: int) -> Tile:
    """Choose the tile for (rows, out_features); the largest only where it gives half the multiprocessors one."""
    if dtype == torch.float32:
        if rows <= 16:
            return Tile(16, 32, 64, 4, 3)
        return Tile(32, 64, 32, 8, 3) if rows <= 64 else Tile(64, 64, 16, 8, 3)
    if rows <= 16:
        return Tile(16, 32, 128, 4, 4)
    if rows <= 32:
        return Tile(32, 32, 128, 4, 4)
    large = Tile(128, 128, 64, 8, 3)
    if triton.cdiv(rows, large.block_m) * triton.cdiv(out_features, large.block_n) < multiprocessors / 2:
        return Tile(64, 64, 64, 4, 4)
    return large


def split_k(tile: Tile, rows: int, in_features: int, out_features: int, multiprocessors: int) -> int:
    """Choose into how many parts K is split: the largest power of two that gives no multiprocessor two programs."""
    programs: int = triton.cdiv(rows, tile.block_m) * triton.cdiv(out_features, tile.block_n)
    steps: int = triton.cdiv(in_features, tile.block_k)
    most = max(1, min(multiprocessors // programs, steps // FEWEST_STEPS))
    return 1 << most.bit_length() - 1


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
