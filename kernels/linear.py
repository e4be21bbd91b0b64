"""Linear layer, residual + act(x W' + b), with the epilogue in the kernel, and K split for few rows.

Reads MK + NK (+ MN) and writes MN elements for 2MNK FLOPs; K in S parts writes and reads 4SMN bytes more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from kernels.activation import ACTIVATIONS, activate, check_activation
from kernels.interpreter import dot
from kernels.operands import as_rows, check_like, check_rows, launch_on, multiprocessor_count, with_descriptors
from kernels.tiles import Tile, choose_tile, split_k, store_tile, tile_of_program

OP = "linear"
BLOCK = 1024  # elements of the result that one program of the second kernel sums


@triton.jit  # type: ignore[untyped-decorator]
def _finish(
    total: tl.tensor,  # (rows, columns) float32
    bias_ptr: tl.tensor | None,  # (N,)
    residual_ptr: tl.tensor | None,  # (M, N)
    residual_stride_m: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    ACTIVATION: tl.constexpr,
) -> tl.tensor:
    if bias_ptr is not None:
        total += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION is not None:
        total = activate(total, ACTIVATION)
    if residual_ptr is not None:
        residual_ptrs = residual_ptr + rows[:, None] * residual_stride_m + columns[None, :]
        mask = (rows < M)[:, None] & (columns < N)[None, :]
        total += tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _linear_kernel(
    x_ptr: tl.tensor,  # (M, K)
    weight_ptr: tl.tensor,  # (N, K)
    bias_ptr: tl.tensor | None,  # (N,)
    residual_ptr: tl.tensor | None,  # (M, N)
    out_ptr: tl.tensor,  # (M, N), or the parts' sums, (SPLIT, M, N) float32
    x_stride_m: tl.tensor,
    weight_stride_n: tl.tensor,
    residual_stride_m: tl.tensor,
    out_stride_m: tl.tensor,
    part_stride: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    part = tl.program_id(0) // tiles
    tile_m, tile_n = tile_of_program(tl.program_id(0) % tiles, M, N, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: offsets pass 2**31
    columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < M, columns < N
    steps = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT)
    first = part * steps * BLOCK_K
    depth = tl.arange(0, BLOCK_K)

    x_ptrs = x_ptr + first + rows[:, None] * x_stride_m + depth[None, :]  # (BLOCK_M, BLOCK_K)
    weight_ptrs = weight_ptr + first + columns[None, :] * weight_stride_n + depth[:, None]  # (BLOCK_K, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps):
        is_deep = depth < K - first - step * BLOCK_K
        x = tl.load(x_ptrs, mask=is_row[:, None] & is_deep[None, :], other=0.0)
        total = dot(x, tl.load(weight_ptrs, mask=is_deep[:, None] & is_column[None, :], other=0.0), total)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K

    if SPLIT == 1:
        total = _finish(total, bias_ptr, residual_ptr, residual_stride_m, rows, columns, M, N, ACTIVATION)
    else:
        out_ptr += part.to(tl.int64) * part_stride
    store_tile(total, out_ptr, out_stride_m, rows, columns, M, N)


@triton.jit  # type: ignore[untyped-decorator]
def _linear_tma_kernel(
    x_ptr: tl.tensor,  # (M, K)
    weight_ptr: tl.tensor,  # (N, K)
    bias_ptr: tl.tensor | None,  # (N,)
    residual_ptr: tl.tensor | None,  # (M, N)
    out_ptr: tl.tensor,  # (M, N)
    x_stride_m: tl.tensor,
    weight_stride_n: tl.tensor,
    residual_stride_m: tl.tensor,
    out_stride_m: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    # The copy engine fills what lies outside with zeros, and needs no registers for addresses and masks.
    x_tiles = tl.make_tensor_descriptor(x_ptr, [M, K], [x_stride_m, 1], [BLOCK_M, BLOCK_K])
    weight_tiles = tl.make_tensor_descriptor(weight_ptr, [N, K], [weight_stride_n, 1], [BLOCK_N, BLOCK_K])
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for program in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = tile_of_program(program, M, N, BLOCK_M, BLOCK_N, GROUP)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(tl.cdiv(K, BLOCK_K)):
            x = x_tiles.load([tile_m * BLOCK_M, step * BLOCK_K])  # (BLOCK_M, BLOCK_K)
            total = dot(x, weight_tiles.load([tile_n * BLOCK_N, step * BLOCK_K]).T, total)
        rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # int64: offsets pass 2**31
        columns = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = _finish(total, bias_ptr, residual_ptr, residual_stride_m, rows, columns, M, N, ACTIVATION)
        store_tile(total, out_ptr, out_stride_m, rows, columns, M, N)


@triton.jit  # type: ignore[untyped-decorator]
def _linear_sum_kernel(
    parts_ptr: tl.tensor,  # (SPLIT, M, N) float32
    bias_ptr: tl.tensor | None,  # (N,)
    residual_ptr: tl.tensor | None,  # (M, N)
    out_ptr: tl.tensor,  # (M, N)
    residual_stride_m: tl.tensor,
    out_stride_m: tl.tensor,
    part_stride: tl.tensor,
    M: tl.tensor,
    N: tl.tensor,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    column_blocks = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    rows = (program // column_blocks).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (program % column_blocks) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    part_ptrs = parts_ptr + rows[:, None] * N + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in tl.static_range(SPLIT):  # in this order every time: the sum is the same on every run
        total += tl.load(part_ptrs, mask=mask, other=0.0)
        part_ptrs += part_stride
    total = _finish(total, bias_ptr, residual_ptr, residual_stride_m, rows, columns, M, N, ACTIVATION)
    store_tile(total, out_ptr, out_stride_m, rows, columns, M, N)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``residual + act(x W' + b)``: float32 sums and arithmetic, rounded once.

    float32 stays float32, with no TF32. Where rows are few, K is split among programs whose sums a second kernel adds
    up in one fixed order, so that results do not change from run to run.

    Args:
        x: (..., in), float32, float16 or bfloat16, last dimension contiguous; rows may be strided.
        weight: (out, in), dtype and device of `x`, last dimension contiguous, as `torch.nn.Linear` holds it.
        bias: (out,), likewise.
        activation: None, "gelu" (erf), "gelu_tanh", "silu" or "relu".
        residual: (..., out), leading dimensions, dtype and device of `x`, last dimension contiguous. Not written to.

    Returns:
        (..., out), contiguous, dtype and device of `x`.

    Raises:
        ValueError: a shape, stride or device is wrong, a width is zero, or the activation is unknown.
        TypeError: a dtype is wrong.

    Source: tiles ordered as in Triton's matrix multiplication tutorial.
    """
    out: Tensor = torch.ops.mlp.linear.default(x, weight, bias, activation, residual)
    return out


def linear_torch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute the same in PyTorch, in the operands' own dtype: eager's rounding, or exact in float64."""
    out = F.linear(x, weight, bias)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out if residual is None else residual + out


@torch.library.custom_op("mlp::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None) -> Tensor:
    _check(x, weight, bias, activation, residual)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    rows, folded = as_rows(x), None if residual is None else as_rows(residual)
    M, K, N = *rows.shape, weight.shape[0]
    tile = choose_tile(OP, rows, weight)
    split = split_k(tile, M, K, N, multiprocessor_count(x))
    launch(as_rows(out), rows, weight, bias, activation, folded, tile, split)
    return out


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None) -> Tensor:
    _check(x, weight, bias, activation, residual)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None) -> None:
    check_rows(OP, "x", x)
    if activation is not None:
        check_activation(OP, activation)
    if weight.ndim != 2 or weight.shape[0] == 0:
        raise ValueError(f"{OP}: weight must be (out, in) with out above zero, got {tuple(weight.shape)}")
    check_like(OP, "weight", weight, (weight.shape[0], x.shape[-1]), "x", x)
    if bias is not None:
        check_like(OP, "bias", bias, weight.shape[:1], "x", x)
    if residual is not None:
        check_like(OP, "residual", residual, (*x.shape[:-1], weight.shape[0]), "x", x)


def launch(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    tile: Tile,
    split: int,
) -> None:
    """Fill `out`, (rows, out), from checked operands, x as (rows, in), with K in `split` parts."""
    with launch_on(OP, x):
        (M, K), N = x.shape, weight.shape[0]
        if M == 0:
            return
        if tile.feed == "tma":
            _launch_tma(out, x, weight, bias, activation, residual, tile)
            return
        target = out if split == 1 else x.new_empty((split, M, N), dtype=torch.float32)
        residual_stride_m = 0 if residual is None else residual.stride(0)
        grid = (triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n) * split,)
        _linear_kernel[grid](
            *(x, weight, bias, residual, target),
            *(x.stride(0), weight.stride(0), residual_stride_m, target.stride(-2)),
            *(M * N, M, N, K, activation),
            **tile.constants,
            SPLIT=split,
            **tile.options,
        )
        if split == 1:
            return
        block_n = min(BLOCK, triton.next_power_of_2(N))
        block_m = BLOCK // block_n
        _linear_sum_kernel[(triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)](
            *(target, bias, residual, out, residual_stride_m, out.stride(0), M * N, M, N, activation),
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            SPLIT=split,
            num_warps=4,
        )


def _launch_tma(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    tile: Tile,
) -> None:
    (M, K), N = x.shape, weight.shape[0]
    tiles = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n)
    programs = min(tiles, multiprocessor_count(x))
    with_descriptors(_linear_tma_kernel[(programs,)], x)(
        *(x, weight, bias, residual, out),
        *(x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0), out.stride(0)),
        *(M, N, K, activation),
        **tile.constants,
        **tile.options,
    )
