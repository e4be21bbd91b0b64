import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.tiles import Tile, gated_linear_tile, linear_tile, split_k

ROWS = [1, 16, 17, 32, 33, 64, 65, 128, 129, 8192]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

COMPILE = """
import json, pathlib, subprocess, sys, tempfile
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels import gated_linear, linear

tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
for op, dtype, split, tile in json.loads(sys.argv[1]):
    kernel = {"linear": linear._linear_kernel, "gated_linear": gated_linear._gated_linear_kernel}[op]
    blocks = {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": tile[2], "GROUP": 8, "ACTIVATION": "gelu_tanh"}
    blocks |= {"SPLIT": split} if op == "linear" else {}
    kinds = ["*" + dtype if name.endswith("_ptr") else "i32" for name in kernel.arg_names]
    kinds = ["constexpr" if name in blocks else kind for name, kind in zip(kernel.arg_names, kinds)]
    if split > 1:
        kinds[kernel.arg_names.index("out_ptr")] = "*fp32"
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(kinds) if kind != "constexpr"}
    source = ASTSource(kernel, dict(zip(kernel.arg_names, kinds)), blocks, aligned)
    options = {"num_warps": tile[3], "num_stages": tile[4]}
    for arch in (80, 90):
        built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            sass = subprocess.run([tools / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
        print(json.dumps((arch, " STL" in sass or " LDL" in sass, "MMA" in sass, built.metadata.shared)))
    built = triton.compile(source, target=GPUTarget("hip", "gfx942", 64), options=options)
    code = built.asm["amdgcn"]
    print(json.dumps(("gfx942", ".vgpr_spill_count: 0" not in code, "v_mfma" in code, built.metadata.shared)))
"""


def tiles_of(dtype: torch.dtype, rows: int) -> tuple[Tile, Tile]:
    return gated_linear_tile(dtype, rows), linear_tile(dtype, rows, 768, 132)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_are_what_triton_takes(dtype: torch.dtype, rows: int) -> None:
    for tile in tiles_of(dtype, rows):
        assert all(size >= 16 and size & (size - 1) == 0 for size in tile[:3])
        assert tile.num_warps in {4, 8}
        assert tile.num_stages >= 2


def test_few_rows_waste_no_tile() -> None:
    for dtype in DTYPES:
        for rows, height in ((1, 16), (16, 16), (17, 32), (32, 32)):
            assert [tile.block_m for tile in tiles_of(dtype, rows)] == [height, height]


def test_k_is_split_only_where_multiprocessors_would_idle() -> None:
    def parts(rows: int, in_features: int, out_features: int, multiprocessors: int = 132) -> int:
        tile = linear_tile(torch.bfloat16, rows, out_features, multiprocessors)
        return split_k(tile, rows, in_features, out_features, multiprocessors)

    assert [parts(rows, 3072, 768) for rows in (1, 64, 256, 512, 8192)] == [4, 8, 2, 1, 1]
    assert parts(1, 14336, 4096) == 1
    assert parts(1, 3072, 768, multiprocessors=24) == 1
    assert parts(1, 64, 64) == 1  # too short to split


@pytest.mark.slow
def test_every_default_compiles_without_spilling_and_fits_shared_memory(tmp_path: Path) -> None:
    cases: set[tuple[str, str, int, Tile]] = set()
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for rows in ROWS:
            gated, plain = tiles_of(dtype, rows)
            cases |= {("gated_linear", name, 1, gated), ("linear", name, 4, plain)}
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", COMPILE, json.dumps(sorted(cases))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2], env=env)
    built: list[tuple[int | str, bool, bool, int]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(built) == 3 * len(cases)
    for at, (arch, has_spills, has_matrix, shared_bytes) in enumerate(built):
        case = arch, sorted(cases)[at // 3]
        assert not has_spills, case
        assert has_matrix or case[1][1] == "fp32", case
        assert shared_bytes <= (64 if arch == "gfx942" else 99) * 1024, case
