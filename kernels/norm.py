"""RMSNorm and LayerNorm of x, or of x + residual. Reads MN (2MN) and writes MN (2MN) elements: memory-bound.

A row stays in registers from its load to its store, so that a LayerNorm can take its variance from the deviations from
the mean without a second read.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.interpreter import rounded
from kernels.operands import as_rows, check_like, check_rows, launch_on

WIDEST = 16384  # 32 elements of the row a thread at 16 warps; a row twice as wide spills in float32


class NormBlock(NamedTuple):
    """The rows and columns that one program normalizes, and its warps."""

    block_m: int
    block_n: int
    num_warps: int


def norm_block(width: int) -> NormBlock:
    """Choose rows and warps per program for `width` columns: 8 elements per thread up to 4096 columns, then more."""
    block_n: int = triton.next_power_of_2(width)
    return NormBlock(max(1, 1024 // block_n), block_n, min(16, max(4, block_n // 256)))


@triton.jit  # type: ignore[untyped-decorator]
def _norm_kernel(
    x_ptr: tl.tensor,  # (M, N)
    residual_ptr: tl.tensor | None,  # (M, N)
    weight_ptr: tl.tensor | None,  # (N,)
    bias_ptr: tl.tensor | None,  # (N,)
    out_ptr: tl.tensor,  # (M, N)
    total_ptr: tl.tensor | None,  # (M, N)
    x_stride_m: tl.tensor,
    residual_stride_m: tl.tensor,
    out_stride_m: tl.tensor,
    total_stride_m: tl.tensor,
    eps: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    IS_CENTERED: tl.constexpr,  # LayerNorm, else RMSNorm
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # int64: offsets pass 2**31
    columns = tl.arange(0, BLOCK_N)[None, :]
    is_column = columns < N
    mask = (rows < M) & is_column
    x = tl.load(x_ptr + rows * x_stride_m + columns, mask=mask, other=0.0).to(tl.float32)  # read MN
    if residual_ptr is not None:
        x += tl.load(residual_ptr + rows * residual_stride_m + columns, mask=mask, other=0.0).to(tl.float32)  # read MN
    if total_ptr is not None:
        total = rounded(x, total_ptr.dtype.element_ty)
        tl.store(total_ptr + rows * total_stride_m + columns, total, mask=mask)  # write MN
    if IS_CENTERED:
        mean = tl.sum(x, axis=1, keep_dims=True) / N
        x = tl.where(is_column, x - mean, 0.0)
    x *= tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / N + eps)
    if weight_ptr is not None:
        x *= tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    out = rounded(x, out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * out_stride_m + columns, out, mask=mask)  # write MN


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute ``s / sqrt(mean(s**2) + eps) * weight`` of ``s = x + residual``, over the last dimension.

    float32 arithmetic, rounded once; the sum with the residual is not rounded in between.

    Args:
        x: (..., n), n up to 16384, float32, float16 or bfloat16, last dimension contiguous; rows may be strided.
        weight: (n,), dtype and device of `x`.
        eps: added to the mean square; not negative.
        residual: shape, dtype and device of `x`, last dimension contiguous.

    Returns:
        (..., n), contiguous, dtype and device of `x`.

    Raises:
        ValueError: a shape, stride or device is wrong, or `eps` is negative.
        TypeError: a dtype is wrong.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    out: Tensor = torch.ops.mlp.norm.default(x, residual, weight, None, eps, False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm` of ``x + residual`` and return that sum too, as (normalized, sum).

    The sum is what the next residual add needs; both come from one read of the operands. Raises as `rms_norm` does.
    """
    out: tuple[Tensor, Tensor] = torch.ops.mlp.add_norm.default(x, residual, weight, None, eps, False)
    return out


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``(s - mean(s)) / sqrt(var(s) + eps) * weight + bias`` of ``s = x + residual``, over the last dimension.

    float32 arithmetic, rounded once; the sum with the residual is not rounded in between. The variance is the biased
    one, of deviations from the mean.

    Args:
        x: (..., n), n up to 16384, float32, float16 or bfloat16, last dimension contiguous; rows may be strided.
        weight: (n,), dtype and device of `x`.
        bias: (n,), dtype and device of `x`.
        eps: added to the variance; not negative.
        residual: shape, dtype and device of `x`, last dimension contiguous.

    Returns:
        (..., n), contiguous, dtype and device of `x`.

    Raises:
        ValueError: a shape, stride or device is wrong, or `eps` is negative.
        TypeError: a dtype is wrong.

    Source: Ba, Kiros and Hinton 2016, https://arxiv.org/abs/1607.06450.
    """
    out: Tensor = torch.ops.mlp.norm.default(x, residual, weight, bias, eps, True)
    return out


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute `layer_norm` of ``x + residual`` and return that sum too, as (normalized, sum).

    The sum is what the next residual add needs; both come from one read of the operands. Raises as `layer_norm` does.
    """
    out: tuple[Tensor, Tensor] = torch.ops.mlp.add_norm.default(x, residual, weight, bias, eps, True)
    return out


def rms_norm_torch(x: Tensor, weight: Tensor | None = None, *, eps: float, residual: Tensor | None = None) -> Tensor:
    """Compute the same in PyTorch, in the operands' own dtype: eager's rounding, or exact in float64."""
    total = x if residual is None else x + residual
    return F.rms_norm(total, x.shape[-1:], weight, eps)


def layer_norm_torch(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the same in PyTorch, in the operands' own dtype: eager's rounding, or exact in float64."""
    total = x if residual is None else x + residual
    return F.layer_norm(total, x.shape[-1:], weight, bias, eps)


@torch.library.custom_op("mlp::norm", mutates_args=())
def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> Tensor:
    _check(x, residual, weight, bias, eps, is_centered)
    out = x.new_empty(x.shape)
    folded = None if residual is None else as_rows(residual)
    _launch(as_rows(out), None, as_rows(x), folded, weight, bias, eps, is_centered)
    return out


@_norm.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> Tensor:
    _check(x, residual, weight, bias, eps, is_centered)
    return x.new_empty(x.shape)


@torch.library.custom_op("mlp::add_norm", mutates_args=())
def _add_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias, eps, is_centered)
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(as_rows(out), as_rows(total), as_rows(x), as_rows(residual), weight, bias, eps, is_centered)
    return out, total


@_add_norm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> tuple[Tensor, Tensor]:
    _check(x, residual, weight, bias, eps, is_centered)
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _check(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, is_centered: bool
) -> None:
    op = "layer_norm" if is_centered else "rms_norm"
    check_rows(op, "x", x)
    if x.shape[-1] > WIDEST:
        raise ValueError(f"{op}: x must be at most {WIDEST} wide, got {tuple(x.shape)}")
    if not eps >= 0:
        raise ValueError(f"{op}: eps must not be negative, got {eps}")
    if residual is not None:
        check_like(op, "residual", residual, x.shape, "x", x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            check_like(op, name, vector, x.shape[-1:], "x", x)


def _launch(
    out: Tensor,
    total: Tensor | None,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    is_centered: bool,
) -> None:
    with launch_on("layer_norm" if is_centered else "rms_norm", x):
        M, N = x.shape
        if M == 0:
            return
        block = norm_block(N)
        _norm_kernel[(triton.cdiv(M, block.block_m),)](
            *(x, residual, weight, bias, out, total),
            *(0 if each is None else each.stride(0) for each in (x, residual, out, total)),
            *(eps, M, N, is_centered, block.block_m, block.block_n),
            num_warps=block.num_warps,
        )
