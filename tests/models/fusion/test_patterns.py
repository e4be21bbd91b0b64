"""Every kind of block that is known, fused, computes what it did."""

import copy

import pytest
import torch

from kernels.numerics import disagreement
from models import fuse
from tests.models.fusion import made_blocks
from tests.models.fusion.made_blocks import BLOCKS, made, rows

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def fault(name: str, dtype: torch.dtype) -> str | None:
    """Apply the rule: the fused block against itself in float64, its own forward being eager."""
    block, x = made(name, dtype), rows(dtype, 2, made_blocks.ROWS, made_blocks.DIM)
    eager, exact = block(x), copy.deepcopy(block).double()(x.double())
    report = fuse(block)
    assert report.left_alone == ()
    assert report.swapped
    with torch.inference_mode():
        return disagreement(block(x), eager, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_fused_block_computes_what_its_own_forward_does(name: str, dtype: torch.dtype) -> None:
    assert fault(name, dtype) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # the interpreter's exp, to infinity
@pytest.mark.parametrize("name", BLOCKS)
def test_triton_kernels_compute_what_the_own_forward_does(name: str, triton: None) -> None:
    assert fault(name, torch.float32) is None
