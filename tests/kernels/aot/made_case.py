from kernels.aot.cases import Case
from kernels.tiles import Tile

MEDIUM = Tile(64, 64, 64, 4, 3)


def matrix_case(arch: str = "sm_90", dtype: str = "bf16", tile: Tile = MEDIUM) -> Case:
    """Make a case of the gated layer."""
    blocks = ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n), ("BLOCK_K", tile.block_k)
    parameters = ("ACTIVATION", "gelu_tanh"), *blocks, ("GROUP", 8)
    return Case("gated_linear", arch, dtype, parameters, ("eps",), tile.num_warps, tile.num_stages)
