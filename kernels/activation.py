"""Gated activation, act(gate) * up. Reads 2MN and writes MN elements: memory-bound, its roof is the bandwidth."""

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.interpreter import rounded
from kernels.operands import as_rows, check_like, check_rows, launch_on

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}

# Eight elements a thread at four warps: one 16-byte load each of gate and up in a two-byte dtype, two in float32.
BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def activate(z: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Apply a float32 activation, NaN and infinity as PyTorch does."""
    if ACTIVATION == "gelu":
        out = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2u), which no exponential of a large u can turn into inf / inf.
        out = z * tl.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    elif ACTIVATION == "silu":
        out = z * tl.sigmoid(z)
    else:
        tl.static_assert(ACTIVATION == "relu")
        out = tl.where(z < 0.0, 0.0, z)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _gated_activation_kernel(
    gate_ptr: tl.tensor,  # (M, N)
    up_ptr: tl.tensor,  # (M, N)
    out_ptr: tl.tensor,  # (M, N)
    gate_stride_m: tl.tensor,
    up_stride_m: tl.tensor,
    out_stride_m: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    column_blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    rows = (program // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # offsets pass 2**31
    columns = (program % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (rows < M) & (columns < N)
    gate = tl.load(gate_ptr + rows * gate_stride_m + columns, mask=mask, other=0.0).to(tl.float32)  # read MN
    up = tl.load(up_ptr + rows * up_stride_m + columns, mask=mask, other=0.0).to(tl.float32)  # read MN
    out = rounded(activate(gate, ACTIVATION) * up, out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows * out_stride_m + columns, out, mask=mask)  # write MN


def gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute ``act(gate) * up`` in one pass: float32 arithmetic, rounded once.

    Args:
        gate: (..., n), float32, float16 or bfloat16, last dimension contiguous; rows may be strided.
        up: shape, dtype and device of `gate`; the two may be halves of one tensor.
        activation: "gelu" (erf), "gelu_tanh", "silu" or "relu".

    Returns:
        (..., n), contiguous, dtype and device of `gate`.

    Raises:
        ValueError: a shape, stride or device is wrong, or the activation is unknown.
        TypeError: a dtype is wrong.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """
    out: Tensor = torch.ops.mlp.gated_activation.default(gate, up, activation)
    return out


def gated_activation_torch(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Compute the same in PyTorch, in the operands' own dtype: eager's rounding, or exact in float64."""
    return ACTIVATIONS[activation](gate) * up


def check_activation(op: str, activation: str) -> None:
    """Check that `activation` is known.

    Raises:
        ValueError: it is not.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


@torch.library.custom_op("mlp::gated_activation", mutates_args=())
def _gated_activation(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check(gate, up, activation)
    out = gate.new_empty(gate.shape)
    _launch(as_rows(out), as_rows(gate), as_rows(up), activation)
    return out


@_gated_activation.register_fake
def _(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    _check(gate, up, activation)
    return gate.new_empty(gate.shape)


def _check(gate: Tensor, up: Tensor, activation: str) -> None:
    check_rows("gated_activation", "gate", gate)
    check_like("gated_activation", "up", up, gate.shape, "gate", gate)
    check_activation("gated_activation", activation)


def _launch(out: Tensor, gate: Tensor, up: Tensor, activation: str) -> None:
    with launch_on("gated_activation", gate):
        M, N = gate.shape
        if M == 0:
            return
        block_n = min(BLOCK, triton.next_power_of_2(N))
        block_m = BLOCK // block_n
        grid = (triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)
        strides = gate.stride(0), up.stride(0), out.stride(0)
        _gated_activation_kernel[grid](gate, up, out, *strides, M, N, activation, block_m, block_n, num_warps=4)
