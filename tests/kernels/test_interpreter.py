import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernels.interpreter import INTERPRETED, dot, rounded

interpreted = pytest.mark.skipif(not INTERPRETED, reason="about the interpreter, which a GPU does without")


@triton.jit  # type: ignore[untyped-decorator]
def _rounded_kernel(value_ptr: tl.tensor, out_ptr: tl.tensor, BLOCK: tl.constexpr, FIX: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)
    value = tl.load(value_ptr + at)
    if FIX:  # noqa: SIM108
        out = rounded(value, out_ptr.dtype.element_ty)
    else:
        out = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out)


@triton.jit  # type: ignore[untyped-decorator]
def _dot_kernel(a_ptr: tl.tensor, b_ptr: tl.tensor, out_ptr: tl.tensor, BLOCK: tl.constexpr, FIX: tl.constexpr) -> None:
    at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    a, b, total = tl.load(a_ptr + at), tl.load(b_ptr + at), tl.load(out_ptr + at)
    if FIX:  # noqa: SIM108
        total = dot(a, b, total)
    else:
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(out_ptr + at, total)


def spread() -> torch.Tensor:
    """Make 4096 floats that meet every case: ties both ways, NaN, infinities, subnormals, the largest."""
    bits = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    bits[:6] = (
        0x3F808000,
        0x3F818000,
        0x3F80FFFF,
        0x7F7FFFFF,
        0x7F800000,
        0xFF800000,
    )  # 2 ties, a carry, max, infinities
    bits[6:10] = 0x7FC00000, 0xFFFFFFFF, 0x00000001, 0x80000000
    return torch.from_numpy(bits.view(np.float32))


@interpreted
def test_bfloat16_is_rounded_to_nearest_even() -> None:
    value = spread()
    out = torch.empty(4096, dtype=torch.bfloat16)
    _rounded_kernel[(1,)](value, out, 4096, True)
    normal = (value.abs() >= torch.finfo(torch.float32).tiny) | (value == 0) | value.isnan()
    torch.testing.assert_close(out[normal], value.bfloat16()[normal], rtol=0, atol=0, equal_nan=True)


@interpreted
def test_the_interpreter_alone_truncates_bfloat16() -> None:
    out = torch.empty(4096, dtype=torch.bfloat16)
    _rounded_kernel[(1,)](spread(), out, 4096, False)
    assert out[2] == 1.0


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dot_sums_in_float32(dtype: torch.dtype) -> None:
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).to(dtype) for seed in (0, 1))
    out = torch.ones(32, 32)
    _dot_kernel[(1,)](a, b, out, 32, True)
    torch.testing.assert_close(out.double(), a.double() @ b.double() + 1, rtol=1e-6, atol=1e-5)


@interpreted
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_the_interpreter_alone_multiplies_bfloat16_bit_patterns() -> None:
    ones = torch.ones(32, 32, dtype=torch.bfloat16)
    out = torch.zeros(32, 32)
    _dot_kernel[(1,)](ones, ones, out, 32, False)
    assert out[0, 0] == 32 * 0x3F80**2


COMPILE = """
import importlib.util, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
spec = importlib.util.spec_from_file_location("kernels_under_test", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
cases = (module._rounded_kernel, ("*fp32", "*bf16")), (module._dot_kernel, ("*bf16", "*bf16", "*fp32"))
for kernel, pointers in cases:
    for fix in (False, True):
        signature = dict(zip(kernel.arg_names, (*pointers, "constexpr", "constexpr")))
        source = ASTSource(kernel, signature, {"BLOCK": 64, "FIX": fix})
        print(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"], end="\\f")
"""


@pytest.mark.slow
def test_compiled_kernels_are_the_same_with_and_without() -> None:
    root = Path(__file__).parents[2]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, __file__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root, env=env)
    # Line numbers and inlining differ; instructions must not.
    codes = [re.findall(r"^\t(?!\.|//).*;", ptx, re.MULTILINE) for ptx in done.stdout.split("\f")[:4]]
    assert any("cvt.rn.bf16" in line for line in codes[1])
    assert codes[0] == codes[1]
    assert codes[2] == codes[3]
    assert any("wgmma" in line for line in codes[3])
