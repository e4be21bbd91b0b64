import pytest
import torch
from torch import Tensor

from kernels.dtypes import DTYPES
from kernels.norm import rms_norm_torch
from kernels.norm_cpu import RMSNormCPU
from kernels.numerics import disagreement

EPS = 1e-5


def operands(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(shape, generator=generator) * scale, torch.randn(shape[-1:], generator=generator)
    return x.to(dtype), weight.to(dtype)


def check(x: Tensor, weight: Tensor, eps: float = EPS) -> str | None:
    exact = rms_norm_torch(x.double(), weight.double(), eps=eps)
    eager = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return disagreement(RMSNormCPU(weight, eps)(x), eager, exact)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 19), (2, 3, 57), (1, 64), (300, 768), (1100, 2), (0, 8), (33,)], ids=str)
def test_agrees_with_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert check(*operands(*shape, dtype=dtype)) is None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 100.0])
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 1.0])
def test_eps_counts_as_much_as_it_should(dtype: torch.dtype, scale: float, eps: float) -> None:
    assert check(*operands(9, 65, dtype=dtype, scale=scale), eps) is None


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_row_of_zeros_stays_zero(dtype: torch.dtype) -> None:
    zeros = torch.zeros(2, 8, dtype=dtype)
    assert torch.equal(RMSNormCPU(torch.ones(8, dtype=dtype), EPS)(zeros), zeros)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_rows_may_be_strided_and_are_left_alone(dtype: torch.dtype) -> None:
    wide, _ = operands(5, 40, dtype=dtype)
    kept, weight = wide.clone(), torch.ones(20, dtype=dtype)
    assert check(wide[:, 3:23], weight) is None
    assert check(wide.T[3:23].T, weight) is None
    assert torch.equal(wide, kept)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_nan_and_infinity_fall_where_they_do_in_eager(dtype: torch.dtype) -> None:
    x, weight = operands(4, 19, dtype=dtype)
    x[1, 3], x[2, 5], x[3, 7] = float("nan"), float("inf"), float("-inf")
    eager = torch.nn.functional.rms_norm(x, weight.shape, weight, EPS)
    fused = RMSNormCPU(weight, EPS)(x)
    assert torch.equal(fused.isnan(), eager.isnan())
    assert torch.equal(fused[2:].nan_to_num(), eager[2:].nan_to_num())


def test_later_changes_to_the_weight_do_not_reach_it() -> None:
    x, weight = operands(3, 8, dtype=torch.float32)
    norm = RMSNormCPU(weight, EPS)
    before = norm(x)
    weight.zero_()
    assert torch.equal(norm(x), before)


@pytest.mark.parametrize(
    ("weight", "eps", "error", "message"),
    [
        (torch.ones(3, dtype=torch.float64), EPS, TypeError, "weight must be float32, bfloat16 or float16"),
        (torch.ones(3, 3), EPS, ValueError, r"weight must be \(n,\), n > 0, on the CPU, got \(3, 3\)"),
        (torch.ones(0), EPS, ValueError, r"weight must be \(n,\), n > 0"),
        (torch.ones(3), -1.0, ValueError, "eps must not be negative"),
        (torch.ones(3), float("nan"), ValueError, "eps must not be negative"),
    ],
    ids=["dtype", "shape", "empty", "eps", "eps nan"],
)
def test_refuses_what_it_cannot_be_made_from(weight: Tensor, eps: float, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RMSNormCPU(weight, eps)


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (torch.ones(2, 4), ValueError, r"x must be \(..., 3\), got \(2, 4\)"),
        (torch.ones(()), ValueError, r"x must be \(..., 3\), got \(\)"),
        (torch.ones(2, 3, dtype=torch.bfloat16), TypeError, "x must be torch.float32"),
        (torch.ones(2, 3, device="meta"), ValueError, "x must be on the CPU, got meta"),
    ],
    ids=["width", "rank", "dtype", "device"],
)
def test_refuses_what_it_cannot_take(x: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RMSNormCPU(torch.ones(3), EPS)(x)
