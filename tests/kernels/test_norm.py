from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import norm as op
from kernels.norm import (
    WIDEST,
    add_layer_norm,
    add_rms_norm,
    layer_norm,
    layer_norm_torch,
    norm_block,
    rms_norm,
    rms_norm_torch,
)
from kernels.numerics import disagreement

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(1, 1), (7, 19), (2, 3, 57), (1, 1030), (1100, 2), (0, 8), (2, 0, 8), (33,), (2, 5000)]
EPS = 1e-5
# Rows that pad a block are zero, and with no eps NumPy warns of dividing by them; they are not stored.
padding_warns = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")
Mutant = Callable[[ModuleType, str, str], ModuleType]


def operands(
    *shape: int, dtype: torch.dtype, device: torch.device, mean: float = 0.5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make x, residual, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    width = shape[-1]
    x, residual = torch.randn(shape, generator=generator) + mean, torch.randn(shape, generator=generator)
    weight, bias = torch.randn(width, generator=generator), torch.randn(width, generator=generator)
    return x.to(device, dtype), residual.to(device, dtype), weight.to(device, dtype), bias.to(device, dtype)


def check_rms(
    result: Tensor, x: Tensor, weight: Tensor | None = None, residual: Tensor | None = None, eps: float = EPS
) -> str | None:
    x64, weight64, residual64 = (None if each is None else each.double() for each in (x, weight, residual))
    assert x64 is not None
    exact = rms_norm_torch(x64, weight64, eps=eps, residual=residual64)
    return disagreement(result, rms_norm_torch(x, weight, eps=eps, residual=residual), exact)


def check_layer(
    result: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = EPS,
) -> str | None:
    x64, weight64, bias64, residual64 = (
        None if each is None else each.double() for each in (x, weight, bias, residual)
    )
    assert x64 is not None
    exact = layer_norm_torch(x64, weight64, bias64, eps=eps, residual=residual64)
    return disagreement(result, layer_norm_torch(x, weight, bias, eps=eps, residual=residual), exact)


def check_sum(total: Tensor, x: Tensor, residual: Tensor) -> str | None:
    return disagreement(total, x + residual, x.double() + residual.double())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_as_exact_as_eager(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    x, residual, weight, _ = operands(*shape, dtype=dtype, device=device)
    result = rms_norm(x, weight, eps=EPS)
    assert result.is_contiguous()
    assert check_rms(result, x, weight) is None
    assert check_rms(rms_norm(x, eps=EPS), x) is None
    assert check_rms(rms_norm(x, weight, eps=EPS, residual=residual), x, weight, residual) is None
    result, total = add_rms_norm(x, residual, weight, eps=EPS)
    assert check_rms(result, x, weight, residual) is None
    assert check_sum(total, x, residual) is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_is_as_exact_as_eager(dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    x, residual, weight, bias = operands(*shape, dtype=dtype, device=device)
    result = layer_norm(x, weight, bias, eps=EPS)
    assert result.is_contiguous()
    assert check_layer(result, x, weight, bias) is None
    assert check_layer(layer_norm(x, eps=EPS), x) is None
    assert check_layer(layer_norm(x, weight, eps=EPS), x, weight) is None
    assert check_layer(layer_norm(x, weight, bias, eps=EPS, residual=residual), x, weight, bias, residual) is None
    result, total = add_layer_norm(x, residual, weight, bias, eps=EPS)
    assert check_layer(result, x, weight, bias, residual) is None
    assert check_sum(total, x, residual) is None


def test_a_layer_norm_of_one_column_is_the_bias(device: torch.device) -> None:
    x, _, weight, bias = operands(3, 1, dtype=torch.float32, device=device)
    assert torch.equal(layer_norm(x, weight, bias, eps=EPS), bias.expand(3, 1))


def test_a_mean_far_from_zero_costs_no_precision(device: torch.device) -> None:
    x, _, weight, bias = operands(4, 768, dtype=torch.float32, device=device, mean=1000)
    assert check_layer(layer_norm(x, weight, bias, eps=EPS), x, weight, bias) is None


@padding_warns
def test_eps_is_what_is_given(device: torch.device) -> None:
    x, _, weight, bias = operands(4, 64, dtype=torch.float32, device=device)
    for eps in (0.0, 1e-6, 0.1):
        assert check_rms(rms_norm(x, weight, eps=eps), x, weight, eps=eps) is None
        assert check_layer(layer_norm(x, weight, bias, eps=eps), x, weight, bias, eps=eps) is None


@pytest.mark.parametrize("width", [19, 1030])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reads_and_writes_only_its_operands(dtype: torch.dtype, width: int, device: torch.device) -> None:
    def within_nan(tensor: Tensor) -> tuple[Tensor, Tensor]:
        band = torch.full([size + 2048 for size in tensor.shape], torch.nan, dtype=dtype, device=device)
        return band[tuple(slice(16, 16 + size) for size in tensor.shape)].copy_(tensor), band

    x, residual, weight, bias = operands(5, width, dtype=dtype, device=device)
    (out, out_band), (total, total_band) = within_nan(torch.empty_like(x)), within_nan(torch.empty_like(x))
    inner = [within_nan(each)[0] for each in (x, residual, weight, bias)]
    op._launch(out.fill_(torch.nan), total.fill_(torch.nan), inner[0], inner[1], inner[2], inner[3], EPS, True)
    assert check_layer(out, x, weight, bias, residual) is None
    assert check_sum(total, x, residual) is None
    out.fill_(torch.nan)
    total.fill_(torch.nan)
    assert out_band.isnan().all()
    assert total_band.isnan().all()


def test_offsets_pass_int32(far_apart: Callable[[Tensor], Tensor], device: torch.device) -> None:
    x, residual, weight, _ = operands(3, 19, dtype=torch.float16, device=device)
    out, total = far_apart(torch.full_like(x, torch.nan)), far_apart(torch.full_like(x, torch.nan))
    op._launch(out, total, far_apart(x), far_apart(residual), weight, None, EPS, False)
    assert check_rms(out, x, weight, residual) is None
    assert check_sum(total, x, residual) is None


def test_rows_may_be_strided_anyhow_and_operands_are_not_written_to(device: torch.device) -> None:
    x, residual, weight, _ = operands(6, 4, 38, dtype=torch.float32, device=device)
    weight = weight[:19]
    before = x.clone(), residual.clone()
    for left, right in (
        (x[..., :19], residual[..., 19:]),
        (x[::2, :, 3:22], residual[1::2, :, :19]),
        (x[..., :19].transpose(0, 1), residual[..., :19].transpose(0, 1)),
        (x[:1, :, :19].expand(6, 4, 19), x[..., 19:]),
    ):
        result, total = add_rms_norm(left, right, weight, eps=EPS)
        assert check_rms(result, left, weight, right) is None
        assert check_sum(total, left, right) is None
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
def test_nan_and_infinity_spread_over_their_row_as_in_eager(device: torch.device) -> None:
    x, _, weight, bias = operands(5, 32, dtype=torch.float32, device=device)
    x[1, 3], x[2, 4], x[4, 0] = torch.nan, torch.inf, -torch.inf
    torch.testing.assert_close(rms_norm(x, weight, eps=EPS), rms_norm_torch(x, weight, eps=EPS), equal_nan=True)
    eager = layer_norm_torch(x, weight, bias, eps=EPS)
    torch.testing.assert_close(layer_norm(x, weight, bias, eps=EPS), eager, equal_nan=True)


@padding_warns
@pytest.mark.parametrize(
    ("is_centered", "old", "new"),
    [
        (True, "/ N + eps", "/ N"),
        (False, "/ N + eps", "/ BLOCK_N + eps"),
        (False, "keep_dims=True) / N + eps)", "keep_dims=True) / N) + eps"),
        (True, "x - mean", "x"),
        (True, "tl.where(is_column, x - mean, 0.0)", "x - mean"),
        (True, "keep_dims=True) / N\n        x", "keep_dims=True) / BLOCK_N\n        x"),
        (True, "if bias_ptr is not None:", "if False:"),
        (True, "if weight_ptr is not None:", "if False:"),
        (False, "if residual_ptr is not None:", "if False:"),
        (False, "if IS_CENTERED:", "if True:"),
        (True, "if IS_CENTERED:", "if False:"),
        (False, "rows * residual_stride_m", "rows * x_stride_m"),
        (False, "tl.program_id(0).to", "(tl.program_id(0) * 0).to"),
    ],
)
def test_mutations_fail_the_rule(is_centered: bool, old: str, new: str, mutant: Mutant, device: torch.device) -> None:
    x, residual, weight, bias = operands(70, 57, dtype=torch.bfloat16, device=device)
    residual = torch.cat([residual, residual], dim=1)[:, 57:]
    eps, results = 0.5, []
    for module in (op, mutant(op, old, new)):
        out = torch.full_like(x, torch.nan)
        module._launch(out, None, x, residual, weight, bias if is_centered else None, eps, is_centered)
        if is_centered:
            results.append(check_layer(out, x, weight, bias, residual, eps))
        else:
            results.append(check_rms(out, x, weight, residual, eps))
    assert results[0] is None
    assert results[1] is not None


def test_a_sum_without_the_residual_fails_the_rule(mutant: Mutant, device: torch.device) -> None:
    x, residual, weight, _ = operands(5, 57, dtype=torch.bfloat16, device=device)
    out, total = torch.empty_like(x), torch.empty_like(x)
    changed = mutant(op, "if residual_ptr is not None:", "if False:")
    changed._launch(out, total, x, residual, weight, None, EPS, False)
    assert check_sum(total, x, residual) is not None


@pytest.mark.parametrize("width", [1, 2, 57, 1024, 1025, WIDEST])
def test_a_block_holds_a_row(width: int) -> None:
    block = norm_block(width)
    assert block.block_n >= width
    assert block.block_m * block.block_n >= 1024
    assert 4 <= block.num_warps <= 16


def test_the_widest_row_is_normalized(device: torch.device) -> None:
    x, residual, weight, _ = operands(1, WIDEST, dtype=torch.float16, device=device)
    assert check_rms(rms_norm(x, weight, eps=EPS, residual=residual), x, weight, residual) is None


def test_they_are_well_formed_ops(device: torch.device) -> None:
    x, residual, weight, bias = operands(3, 8, dtype=torch.float32, device=device)
    torch.library.opcheck(torch.ops.mlp.norm.default, (x, None, weight, None, EPS, False))
    torch.library.opcheck(torch.ops.mlp.norm.default, (x, residual, weight, bias, EPS, True))
    torch.library.opcheck(torch.ops.mlp.add_norm.default, (x, residual, None, None, EPS, True))


def test_meta_tensors_give_shapes_alone() -> None:
    x = torch.empty(2, 3, 8, device="meta", dtype=torch.bfloat16)
    for result in (rms_norm(x, eps=EPS), *add_layer_norm(x, x, eps=EPS)):
        assert (result.shape, result.dtype, result.device.type) == (x.shape, x.dtype, "meta")


ONES, ROW = torch.ones(4, 6), torch.ones(6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rms_norm(ONES.double(), eps=EPS), TypeError, r"rms_norm: x must be float32, float16 or bfloat16"),
        (lambda: rms_norm(ONES, ROW.half(), eps=EPS), TypeError, r"rms_norm: weight must be torch\.float32 as x is"),
        (lambda: rms_norm(ONES, ROW[:5], eps=EPS), ValueError, r"rms_norm: weight must be \(6,\), got \(5,\)"),
        (lambda: rms_norm(ONES[:, :0], eps=EPS), ValueError, r"rms_norm: x must be .* width above zero, got \(4, 0\)"),
        (lambda: rms_norm(ONES.t(), eps=EPS), ValueError, "rms_norm: x's last dimension must be contiguous"),
        (lambda: rms_norm(ONES, eps=-1.0), ValueError, r"rms_norm: eps must not be negative, got -1\.0"),
        (lambda: rms_norm(ONES, eps=float("nan")), ValueError, "rms_norm: eps must not be negative, got nan"),
        (lambda: rms_norm(torch.ones(1, 16385), eps=EPS), ValueError, r"at most 16384 wide, got \(1, 16385\)"),
        (lambda: rms_norm(ONES, eps=EPS, residual=ONES[:1]), ValueError, r"residual must be \(4, 6\), got \(1, 6\)"),
        (lambda: add_rms_norm(ONES, ONES.half(), eps=EPS), TypeError, r"rms_norm: residual must be torch\.float32"),
        (lambda: layer_norm(ONES, ROW, ROW[:5], eps=EPS), ValueError, r"layer_norm: bias must be \(6,\), got \(5,\)"),
        (lambda: add_layer_norm(ONES, ROW, eps=EPS), ValueError, r"layer_norm: residual must be \(4, 6\), got \(6,\)"),
        (lambda: layer_norm(ONES, ROW.to("meta"), eps=EPS), ValueError, "weight must be on cpu as x is, got meta"),
    ],
)
def test_rejects(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
