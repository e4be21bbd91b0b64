import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.tiles import Tile, gated_linear_tile

ROWS = [1, 16, 17, 32, 33, 64, 65, 128, 129, 8192]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

COMPILE = """
import json, pathlib, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.gated_linear import GROUP_M, _gated_linear_kernel

tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
for dtype, tile in json.loads(sys.argv[1]):
    blocks = {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": tile[2], "GROUP": GROUP_M, "ACTIVATION": "gelu_tanh"}
    names = _gated_linear_kernel.arg_names
    kinds = ["constexpr" if name in blocks else "*" + dtype if name.endswith("_ptr") else "i32" for name in names]
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(kinds) if kind != "constexpr"}
    source = ASTSource(_gated_linear_kernel, dict(zip(names, kinds)), blocks, aligned)
    options = {"num_warps": tile[3], "num_stages": tile[4]}
    for arch in (80, 90, 100):
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            sass = subprocess.run([tools / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
        print(json.dumps((arch, dtype, " STL" in sass or " LDL" in sass, "MMA" in sass, built.metadata.shared)))
    built = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
    code = built.asm["amdgcn"]
    print(json.dumps(("gfx942", dtype, "spill_count: 0" not in code, "v_mfma" in code, built.metadata.shared)))
"""


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_are_what_triton_takes(dtype: torch.dtype, rows: int) -> None:
    tile = gated_linear_tile(dtype, rows)
    assert all(size >= 16 and size & (size - 1) == 0 for size in tile[:3])
    assert tile.num_warps in {4, 8}
    assert tile.num_stages >= 2


def test_few_rows_waste_no_tile() -> None:
    for dtype in DTYPES:
        assert gated_linear_tile(dtype, 1).block_m == 16
        assert gated_linear_tile(dtype, 16).block_m == 16
        assert gated_linear_tile(dtype, 17).block_m == 32


@pytest.mark.slow
def test_every_default_compiles_without_spilling_and_fits_shared_memory(tmp_path: Path) -> None:
    tiles: list[tuple[str, Tile]] = sorted(
        {
            (name, gated_linear_tile(dtype, rows))
            for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
            for rows in ROWS
        }
    )
    assert len(tiles) >= 6
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE, json.dumps(tiles)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], env=env)
    built: list[tuple[int | str, str, bool, bool, int]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(built) == 4 * len(tiles)
    for arch, dtype, has_spills, has_matrix, shared_bytes in built:
        assert not has_spills, (arch, dtype)
        assert has_matrix or dtype == "fp32", (arch, dtype)
        assert shared_bytes <= (64 if arch == "gfx942" else 99) * 1024, (arch, dtype)
