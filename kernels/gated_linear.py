"""Gated linear layer, act(x Wg' + bg) * (x Wu' + bu): one kernel for both products, which reads x once.

Given an eps, the kernel also takes the RMSNorm of x, without its weight: see kernels/rms_gated_linear.py.
Reads MK + 2NK and writes MN elements for 4MNK FLOPs. Two products and a gated activation write and read 4MN more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.activation import activate, check_activation, gated_activation_torch
from kernels.interpreter import dot
from kernels.operands import as_rows, check_like, check_rows, launch_on, multiprocessor_count, with_descriptors
from kernels.tiles import Tile, choose_tile, store_tile, tile_of_program

OP = "gated_linear"


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_squares(x: tl.tensor) -> tl.tensor:
    wide = x.to(tl.float32)
    return tl.sum(wide * wide, axis=1)


@triton.jit  # type: ignore[untyped-decorator]
def _gated(
    gate: tl.tensor,  # (rows, columns) float32, x Wg'
    up: tl.tensor,  # (rows, columns) float32, x Wu'
    squares: tl.tensor,  # (rows,) float32, of x
    gate_bias_ptr: tl.tensor | None,  # (N,)
    up_bias_ptr: tl.tensor | None,  # (N,)
    columns: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    eps: tl.tensor | None,
    ACTIVATION: tl.constexpr,
) -> tl.tensor:
    if eps is not None:  # a row's scale leaves the sum over K
        scale = tl.rsqrt(squares / K + eps)[:, None]
        gate *= scale
        up *= scale
    is_column = columns < N
    if gate_bias_ptr is not None:
        gate += tl.load(gate_bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if up_bias_ptr is not None:
        up += tl.load(up_bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    return activate(gate, ACTIVATION) * up


@triton.jit  # type: ignore[untyped-decorator]
def _gated_linear_kernel(
    x_ptr: tl.tensor,  # (M, K)
    gate_weight_ptr: tl.tensor,  # (N, K)
    up_weight_ptr: tl.tensor,  # (N, K)
    gate_bias_ptr: tl.tensor | None,  # (N,)
    up_bias_ptr: tl.tensor | None,  # (N,)
    out_ptr: tl.tensor,  # (M, N)
    x_stride_m: tl.tensor,
    gate_weight_stride_n: tl.tensor,
    up_weight_stride_n: tl.tensor,
    out_stride_m: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    eps: tl.tensor | None,  # of an RMSNorm of x; None: x as it is
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    tile_m, tile_n = tile_of_program(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: offsets pass 2**31
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    is_row, is_column = rows < M, columns < N

    x_ptrs = x_ptr + rows[:, None] * x_stride_m + depth[None, :]  # (BLOCK_M, BLOCK_K)
    gate_ptrs = gate_weight_ptr + columns[None, :] * gate_weight_stride_n + depth[:, None]  # (BLOCK_K, BLOCK_N)
    up_ptrs = up_weight_ptr + columns[None, :] * up_weight_stride_n + depth[:, None]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        is_deep = depth < K - step * BLOCK_K
        weight_mask = is_deep[:, None] & is_column[None, :]
        x = tl.load(x_ptrs, mask=is_row[:, None] & is_deep[None, :], other=0.0)
        gate = dot(x, tl.load(gate_ptrs, mask=weight_mask, other=0.0), gate)
        up = dot(x, tl.load(up_ptrs, mask=weight_mask, other=0.0), up)
        if eps is not None:
            squares += _sum_of_squares(x)
        x_ptrs += BLOCK_K
        gate_ptrs += BLOCK_K
        up_ptrs += BLOCK_K

    out = _gated(gate, up, squares, gate_bias_ptr, up_bias_ptr, columns, N, K, eps, ACTIVATION)
    store_tile(out, out_ptr, out_stride_m, rows, columns, M, N)


@triton.jit  # type: ignore[untyped-decorator]
def _gated_linear_tma_kernel(
    x_ptr: tl.tensor,  # (M, K)
    gate_weight_ptr: tl.tensor,  # (N, K)
    up_weight_ptr: tl.tensor,  # (N, K)
    gate_bias_ptr: tl.tensor | None,  # (N,)
    up_bias_ptr: tl.tensor | None,  # (N,)
    out_ptr: tl.tensor,  # (M, N)
    x_stride_m: tl.tensor,
    gate_weight_stride_n: tl.tensor,
    up_weight_stride_n: tl.tensor,
    out_stride_m: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    eps: tl.tensor | None,  # of an RMSNorm of x; None: x as it is
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    # The copy engine fills what lies outside with zeros, and needs no registers for addresses and masks.
    x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [x_stride_m, 1], [BLOCK_M, BLOCK_K])
    gate_tiles = tl.make_tensor_descriptor(gate_weight_ptr, [N, K], [gate_weight_stride_n, 1], [BLOCK_N, BLOCK_K])
    up_tiles = tl.make_tensor_descriptor(up_weight_ptr, [N, K], [up_weight_stride_n, 1], [BLOCK_N, BLOCK_K])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for program in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = tile_of_program(program, M, N, BLOCK_M, BLOCK_N, GROUP)
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_M,), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = x_tiles.load([tile_m * BLOCK_M, step * BLOCK_K])  # (BLOCK_M, BLOCK_K)
            gate = dot(x, gate_tiles.load([tile_n * BLOCK_N, step * BLOCK_K]).T, gate)
            up = dot(x, up_tiles.load([tile_n * BLOCK_N, step * BLOCK_K]).T, up)
            if eps is not None:
                squares += _sum_of_squares(x)

        rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: offsets pass 2**31
        columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        out = _gated(gate, up, squares, gate_bias_ptr, up_bias_ptr, columns, N, K, eps, ACTIVATION)
        store_tile(out, out_ptr, out_stride_m, rows, columns, M, N)


def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    """Compute ``act(x Wg' + bg) * (x Wu' + bu)`` in one kernel: float32 sums and arithmetic, rounded once.

    float32 stays float32, with no TF32. Nothing is rounded on the way to the result, whereas eager rounds gate, up and
    activation.

    Args:
        x: (..., in), float32, float16 or bfloat16, last dimension contiguous; rows may be strided.
        gate_weight: (out, in), dtype and device of `x`, last dimension contiguous, as `torch.nn.Linear` holds it.
        up_weight: (out, in), likewise; the two may be halves of one tensor.
        gate_bias: (out,), likewise.
        up_bias: (out,), likewise.
        activation: "gelu" (erf), "gelu_tanh", "silu" or "relu".

    Returns:
        (..., out), contiguous, dtype and device of `x`.

    Raises:
        ValueError: a shape, stride or device is wrong, a width is zero, or the activation is unknown.
        TypeError: a dtype is wrong.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202; tiles ordered as in Triton's matrix multiplication tutorial.
    """
    out: Tensor = torch.ops.mlp.gated_linear.default(x, gate_weight, up_weight, gate_bias, up_bias, activation)
    return out


def gated_linear_torch(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str,
) -> Tensor:
    """Compute the same in PyTorch, in the operands' own dtype: eager's rounding, or exact in float64."""
    return gated_activation_torch(F.linear(x, gate_weight, gate_bias), F.linear(x, up_weight, up_bias), activation)


@torch.library.custom_op("mlp::gated_linear", mutates_args=())
def _gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> Tensor:
    check(OP, x, gate_weight, up_weight, gate_bias, up_bias, activation)
    out = x.new_empty((*x.shape[:-1], gate_weight.shape[0]))
    rows = as_rows(x)
    tile = choose_tile(OP, rows, gate_weight, up_weight)
    launch(OP, as_rows(out), rows, gate_weight, up_weight, gate_bias, up_bias, activation, tile)
    return out


@_gated_linear.register_fake
def _(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> Tensor:
    check(OP, x, gate_weight, up_weight, gate_bias, up_bias, activation)
    return x.new_empty((*x.shape[:-1], gate_weight.shape[0]))


def check(
    op: str,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
) -> None:
    """Check the operands of a gated linear layer, naming `op`. Raises as `gated_linear` does."""
    check_rows(op, "x", x)
    check_activation(op, activation)
    if gate_weight.ndim != 2 or gate_weight.shape[0] == 0:
        raise ValueError(f"{op}: gate_weight must be (out, in) with out above zero, got {tuple(gate_weight.shape)}")
    shape = (gate_weight.shape[0], x.shape[-1])
    check_like(op, "gate_weight", gate_weight, shape, "x", x)
    check_like(op, "up_weight", up_weight, shape, "x", x)
    for name, bias in (("gate_bias", gate_bias), ("up_bias", up_bias)):
        if bias is not None:
            check_like(op, name, bias, shape[:1], "x", x)


def launch(
    op: str,
    out: Tensor,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    activation: str,
    tile: Tile,
    eps: float | None = None,
) -> None:
    """Fill `out`, (rows, out), of `op` from checked operands, x as (rows, in); with `eps`, x is normed first."""
    with launch_on(op, x):
        (M, K), N = x.shape, gate_weight.shape[0]
        if M == 0:
            return
        programs = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
        operands = (
            *(x, gate_weight, up_weight, gate_bias, up_bias, out),
            *(x.stride(0), gate_weight.stride(0), up_weight.stride(0), out.stride(0)),
            *(M, N, K, eps, activation),
        )
        if tile.feed == "tma":
            programs = min(programs, multiprocessor_count(x))
            with_descriptors(_gated_linear_tma_kernel[(programs,)], x)(*operands, **tile.constants, **tile.options)
        else:
            _gated_linear_kernel[(programs,)](*operands, **tile.constants, **tile.options)
