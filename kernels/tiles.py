"""Tiles of the matrix kernels: a computed default for each dtype and row count.

Every default compiles without spilling for sm_80, sm_90, sm_100 and gfx942, and its stages fit the shared memory a
program may have there and on sm_86 and sm_89: 64 KiB on gfx942, 99 KiB on the smallest of the others.
"""

from typing import NamedTuple

import torch


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
        return (
            Tile(16, 32, 64, 4, 3) if rows <= 16 else Tile(32, 64, 32, 4, 3) if rows <= 64 else Tile(64, 64, 32, 8, 3)
        )
    if rows <= 16:
        return Tile(16, 32, 128, 4, 4)
    if rows <= 32:
        return Tile(32, 32, 128, 4, 3)
    if rows <= 64:
        return Tile(64, 32, 64, 4, 4)
    if rows <= 128:
        return Tile(64, 64, 64, 4, 3)
    return Tile(128, 64, 64, 8, 3)
