"""Gated linear layer of RMSNorm(x): `gated_linear`'s kernels, with the norm in them, in place of two launches.

A row's ``1 / rms(x)`` can be taken out of the sums over K, so it is applied to the two sums, before bias and
activation; the kernel sums the squares of the tiles of x that it multiplies anyway. `fold_norm` multiplies the norm's
weight into the columns of Wg and Wu once. So 2MK fewer elements cross memory than with a separate norm, which writes MK
elements that are then read again.

Source: the algebra of quack's gemm_norm_act, https://github.com/Dao-AILab/quack.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.gated_linear import check as check_gated_linear
from kernels.gated_linear import gated_linear_torch, launch
from kernels.operands import as_rows
from kernels.tiles import choose_tile

OP = "rms_gated_linear"
FOLDED_ROWS = 256  # rows held in float64 at a time, in a few copies: 8 MiB each if they are 4,096 wide


def rms_gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    eps: float,
    activation: str,
) -> Tensor:
    """Compute ``act(n Wg' + bg) * (n Wu' + bu)`` of ``n = x / sqrt(mean(x**2) + eps)``, the mean over a row.

    float32 sums and arithmetic, rounded once; n itself is never rounded, where eager rounds it. The norm's weight is
    assumed to be in the weights: see `fold_norm`.

    Args:
        x: (..., in), float32, float16 or bfloat16, last dimension contiguous; rows may be strided.
        gate_weight: (out, in), dtype and device of `x`, last dimension contiguous.
        up_weight: (out, in), likewise; the two may be halves of one tensor.
        gate_bias: (out,), likewise.
        up_bias: (out,), likewise.
        eps: added to the mean square; not negative.
        activation: "gelu" (erf), "gelu_tanh", "silu" or "relu".

    Returns:
        (..., out), contiguous, dtype and device of `x`.

    Raises:
        ValueError: a shape, stride or device is wrong, a width is zero, `eps` is negative, or the activation unknown.
        TypeError: a dtype is wrong.
    """
    out: Tensor = torch.ops.mlp.rms_gated_linear.default(x, gate_weight, up_weight, gate_bias, up_bias, eps, activation)
    return out


def rms_gated_linear_torch(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    eps: float,
    activation: str,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """Compute the same in PyTorch, in the operands' own dtype: eager's rounding, or exact in float64.

    With `norm_weight`, (in,), the norm's weight is not in the weights: what eager computes of a model as it is stored.
    """
    normed = F.rms_norm(x, x.shape[-1:], norm_weight, eps)
    return gated_linear_torch(normed, gate_weight, up_weight, gate_bias, up_bias, activation=activation)


def fold_norm(weight: Tensor, norm_weight: Tensor) -> Tensor:
    """Multiply the columns of `weight`, (out, in), by a norm's weight, (in,), and round once to the dtype of `weight`.

    That rounding affects the products as eager's rounding of the normed row does: half a unit in the last place per
    term. Besides the result it takes memory for only `FOLDED_ROWS` rows in float64.

    Raises:
        ValueError: the shapes do not fit, or the dtype cannot hold the products: the root-mean-square error of some row
            exceeds half a unit in the last place, since its values are too small or too large.
    """
    if weight.ndim != 2 or norm_weight.shape != weight.shape[1:]:
        raise ValueError(
            f"fold_norm: expected weight (out, in) and norm_weight (in,), got {tuple(weight.shape)} and "
            f"{tuple(norm_weight.shape)}"
        )
    folded = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    wide, unit, off = norm_weight.double(), torch.finfo(weight.dtype).eps / 2, 0
    for start in range(0, len(weight), FOLDED_ROWS):
        exact, out = weight[start : start + FOLDED_ROWS].double() * wide, folded[start : start + FOLDED_ROWS]
        out.copy_(exact)
        off += int((~((out.double() - exact).norm(dim=1) <= unit * exact.norm(dim=1))).sum())
    if off:
        raise ValueError(
            f"fold_norm: {off} of {len(weight)} rows times the norm's weight are beyond what {weight.dtype} holds "
            "precisely"
        )
    return folded


@torch.library.custom_op("mlp::rms_gated_linear", mutates_args=())
def _rms_gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    eps: float,
    activation: str,
) -> Tensor:
    _check(x, gate_weight, up_weight, gate_bias, up_bias, eps, activation)
    out = x.new_empty((*x.shape[:-1], gate_weight.shape[0]))
    rows = as_rows(x)
    tile = choose_tile(OP, rows, gate_weight, up_weight)
    launch(OP, as_rows(out), rows, gate_weight, up_weight, gate_bias, up_bias, activation, tile, eps)
    return out


@_rms_gated_linear.register_fake
def _(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    eps: float,
    activation: str,
) -> Tensor:
    _check(x, gate_weight, up_weight, gate_bias, up_bias, eps, activation)
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


def _check(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    eps: float,
    activation: str,
) -> None:
    check_gated_linear(OP, x, gate_weight, up_weight, gate_bias, up_bias, activation)
    if not eps >= 0:
        raise ValueError(f"{OP}: eps must not be negative, got {eps}")
