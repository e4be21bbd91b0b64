"""Measures operators against eager, and against the device's roof, measured in the same run."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import onednn
from kernels.activation import gated_activation, gated_activation_torch
from kernels.conditions import conditions
from kernels.dtypes import name_of
from kernels.gated_linear import gated_linear, gated_linear_torch
from kernels.linear import linear, linear_torch
from kernels.norm import rms_norm, rms_norm_torch
from kernels.norm_cpu import RMSNormCPU
from kernels.output import four_digits
from kernels.progress import Progress
from kernels.rms_gated_linear import rms_gated_linear, rms_gated_linear_torch
from kernels.roof import Roof, Work, measured_roof, roof_record
from kernels.timing import Timing, cache_flush, interleaved

HINTS = (1, 16, 64, 256)  # row counts that a weight may be packed for
CPU_DTYPES = (torch.float32, torch.bfloat16)
GPU_DTYPES = (torch.bfloat16, torch.float16)
CPU_WIDTHS = ((128, 512), (768, 3072))  # in, out; with the rows, what takes less than half a minute on two cores
GPU_WIDTHS = ((768, 3072), (4096, 14336))  # dim, hidden
CPU_ROWS = (1, 16, 256)
GPU_ROWS = (1, 8, 32, 128, 512, 2048, 8192)

# Liger's modules for a whole gated block, and their activations; none has the exact GELU.
LIGER_ACTIVATIONS = {"LigerGEGLUMLP": "gelu_tanh", "LigerSwiGLUMLP": "silu"}


class Row(NamedTuple):
    """One way to compute one operator at one shape.

    Args:
        op: the operator, with what is fused into it.
        way: on a GPU "eager", "compiled", "liger" or "triton"; on a CPU "plain", "packed for N" rows
            or "fewer passes".
        dtype: of the operands.
        shape: rows, in, out.
        is_cold: whether the caches were flushed before each repetition.
        timing: per call.
        work: what had to be moved and computed.
        roof_share: the least time that this device needs for `work`, over the median time.
    """

    op: str
    way: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    is_cold: bool
    timing: Timing
    work: Work
    roof_share: float

    @property
    def problem(self) -> tuple[str, torch.dtype, tuple[int, int, int], bool]:
        """What was computed, and with which caches: rows that share it differ in the way alone."""
        return self.op, self.dtype, self.shape, self.is_cold

    def record(self) -> dict[str, Any]:
        """Return the row ready for JSON: times in microseconds, rates in GB/s and TFLOP/s."""
        median_s = self.timing.median_s
        return {
            "op": self.op,
            "way": self.way,
            "dtype": name_of(self.dtype),
            "shape": list(self.shape),
            "cold": self.is_cold,
            "median_us": four_digits(median_s * 1e6),
            "low_us": four_digits(self.timing.low_s * 1e6),
            "high_us": four_digits(self.timing.high_s * 1e6),
            "repetitions": self.timing.repetitions,
            "gb_per_s": four_digits(self.work.bytes / median_s / 1e9),
            "tflop_per_s": four_digits(self.work.flops / median_s / 1e12),
            "roof_percent": four_digits(100 * self.roof_share),
        }


class _Contest(NamedTuple):
    op: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    work: Work
    ways: dict[str, Callable[[], object]]


def bench(
    device: torch.device,
    repetitions: int = 15,
    rows: Sequence[int] | None = None,
    widths: Sequence[tuple[int, int]] | None = None,
    is_compiled_too: bool = False,
) -> tuple[Roof, list[Row]]:
    """Measure the roof, then each operator in each way, interleaved, with warm and with flushed caches.

    On a CPU those are oneDNN's fused linear layers against plain ones, a weight packed for each of `HINTS` rows; on a
    GPU the Triton kernels against eager.

    Args:
        device: to measure on.
        repetitions: of each way.
        rows: row counts; `CPU_ROWS` or `GPU_ROWS` if None.
        widths: of the layers, (in, out); on a GPU of whole blocks, (dim, hidden); `CPU_WIDTHS` or `GPU_WIDTHS` if None.
        is_compiled_too: whether to measure `torch.compile` as well, on a GPU.

    Raises:
        RuntimeError: oneDNN cannot run in any dtype here.
    """
    is_gpu = device.type == "cuda"
    dtypes: Sequence[torch.dtype] = (
        GPU_DTYPES if is_gpu else [each for each in CPU_DTYPES if not onednn.unavailable(each)]
    )
    if not dtypes:
        raise RuntimeError(f"bench: {onednn.unavailable(torch.float32)}")
    counts = rows or (GPU_ROWS if is_gpu else CPU_ROWS)
    pairs = widths or (GPU_WIDTHS if is_gpu else CPU_WIDTHS)
    plans = [(dtype, count, *pair) for dtype in dtypes for pair in pairs for count in counts]
    measured: list[Row] = []
    with Progress("bench", len(plans)) as progress, torch.no_grad():
        roof = measured_roof(device, dtypes, [(max(counts), *pair) for pair in pairs])
        flush = cache_flush(device)
        for dtype, count, width, out in plans:
            contests = (
                _gpu_contests(dtype, count, width, out, device, is_compiled_too)
                if is_gpu
                else _cpu_contests(dtype, count, width, out)
            )
            for contest in contests:
                measured += _run(contest, roof, device, repetitions, flush)
            progress.step(f"{dtype} {count}x{width}x{out}")
    return roof, measured


def _run(
    contest: _Contest, roof: Roof, device: torch.device, repetitions: int, flush: Callable[[], object]
) -> Iterator[Row]:
    floor_s = roof.floor_s(contest.work, contest.dtype)
    for is_cold in (False, True):
        # Warm: enough calls for 200 us, next to which reading the clock is nothing.
        calls_each = 1 if is_cold else max(1, min(100, round(200e-6 / floor_s)))
        count = max(5, repetitions // 3) if is_cold and device.type == "cpu" else repetitions
        before = flush if is_cold else None
        for way, each in interleaved(contest.ways, device, count, before, calls_each).items():
            row = contest.op, way, contest.dtype, contest.shape, is_cold, each, contest.work
            yield Row(*row, floor_s / each.median_s)


def linear_work(rows: int, width: int, out: int, itemsize: int, operands: int = 0) -> Work:
    """Count a linear layer's: x, the weight, the result and `operands` of the result's size; 2MNK FLOPs."""
    return Work((rows * width + out * width + (1 + operands) * rows * out) * itemsize, 2 * rows * width * out)


def gated_linear_work(rows: int, width: int, out: int, itemsize: int) -> Work:
    """Count a gated linear layer's: x, both weights, the result; 4MNK FLOPs."""
    return Work((rows * width + 2 * out * width + rows * out) * itemsize, 4 * rows * width * out)


def mlp_work(rows: int, dim: int, hidden: int, itemsize: int) -> Work:
    """Count a gated block's without norm and residual: x, three weights, the result; 6MDH FLOPs."""
    return Work((2 * rows * dim + 3 * dim * hidden) * itemsize, 6 * rows * dim * hidden)


def elementwise_work(rows: int, width: int, itemsize: int, operands: int) -> Work:
    """Count a memory-bound operator's: its operands and its result, all of one size."""
    return Work((operands + 1) * rows * width * itemsize, 0)


def _cpu_contests(dtype: torch.dtype, rows: int, width: int, out: int) -> Iterator[_Contest]:
    generator = torch.Generator().manual_seed(0)
    x, weight, other = (
        torch.randn(sizes, generator=generator).to(dtype) for sizes in ((rows, width), (out, width), (rows, out))
    )
    weight = weight / width**0.5
    packed = {hint: onednn.packed_weight(weight, hint) for hint in HINTS}
    shape, size = (rows, width, out), x.element_size()
    ways: dict[str, Callable[[], object]] = {"plain": partial(F.linear, x, weight)}
    ways |= {
        f"packed for {hint}": partial(onednn.fused_linear, x, each, None, "none", "") for hint, each in packed.items()
    }
    yield _Contest("linear", dtype, shape, linear_work(*shape, size), ways)
    ways = {"plain": lambda: onednn.IN_PLACE["gelu_tanh"](F.linear(x, weight))}
    ways |= {
        f"packed for {hint}": partial(onednn.fused_linear, x, each, None, "gelu", "tanh")
        for hint, each in packed.items()
    }
    yield _Contest("linear gelu_tanh", dtype, shape, linear_work(*shape, size), ways)
    ways = {"plain": lambda: F.linear(x, weight).add_(other)}
    ways |= {
        f"packed for {hint}": partial(onednn.fused_linear_binary, x, other, each, None, "add")
        for hint, each in packed.items()
    }
    yield _Contest("linear residual", dtype, shape, linear_work(*shape, size, 1), ways)
    scale = torch.ones(width, dtype=dtype)
    ways = {
        "plain": partial(F.rms_norm, x, (width,), scale, 1e-6),
        "fewer passes": partial(RMSNormCPU(scale, 1e-6), x),
    }
    yield _Contest("rms_norm", dtype, shape, elementwise_work(rows, width, size, 1), ways)


class _Block(NamedTuple):
    """A gated block's operands: (rows, dim) and (rows, hidden), the norm's weight, and the three matrices."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    h: Tensor
    u: Tensor


def _gpu_contests(
    dtype: torch.dtype, rows: int, dim: int, hidden: int, device: torch.device, is_compiled_too: bool
) -> Iterator[_Contest]:
    if is_compiled_too:
        torch.compiler.reset()  # graphs of other shapes count towards a limit, beyond which nothing is compiled
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator, device=device) * scale).to(dtype)

    block = _Block(
        *(normal(rows, dim), normal(rows, dim), normal(dim)),
        *(normal(hidden, dim, scale=dim**-0.5), normal(hidden, dim, scale=dim**-0.5)),
        normal(dim, hidden, scale=hidden**-0.5),
        *(normal(rows, hidden), normal(rows, hidden)),
    )
    yield from _mlp_contests(block, is_compiled_too)
    yield from _operator_contests(block, is_compiled_too)


def _mlp_contests(block: _Block, is_compiled_too: bool) -> Iterator[_Contest]:
    x, gate, up, down = block.x, block.gate, block.up, block.down
    (rows, dim), hidden = x.shape, len(gate)
    shape = rows, dim, hidden
    for mlp, activation in LIGER_ACTIVATIONS.items():
        ways = _ways(partial(_mlp, activation), partial(_mlp_torch, activation), (x, gate, up, down), is_compiled_too)
        liger = _liger(mlp, gate, up, down)
        if liger is not None:
            ways["liger"] = partial(liger, x)
        yield _Contest(f"mlp {activation}", x.dtype, shape, mlp_work(*shape, x.element_size()), ways)


def _operator_contests(block: _Block, is_compiled_too: bool) -> Iterator[_Contest]:
    x, residual, weight, gate, up, down, h, u = block
    (rows, dim), hidden, size = x.shape, len(gate), x.element_size()
    act, eps = "gelu_tanh", 1e-5

    def contest(
        op: str,
        shape: tuple[int, int, int],
        work: Work,
        fused: Callable[..., Tensor],
        eager: Callable[..., Tensor],
        operands: Sequence[Tensor],
        **keywords: object,
    ) -> _Contest:
        ways = _ways(partial(fused, **keywords), partial(eager, **keywords), operands, is_compiled_too)
        return _Contest(op, x.dtype, shape, work, ways)

    shape, work = (rows, hidden, hidden), elementwise_work(rows, hidden, size, 2)
    yield contest("gated_activation", shape, work, gated_activation, gated_activation_torch, (h, u), activation=act)
    shape, work = (rows, dim, hidden), gated_linear_work(rows, dim, hidden, size)
    operands = x, gate, up
    yield contest("gated_linear", shape, work, gated_linear, gated_linear_torch, operands, activation=act)
    both = rms_gated_linear, rms_gated_linear_torch
    yield contest("rms_gated_linear", shape, work, *both, operands, eps=eps, activation=act)
    shape, work = (rows, hidden, dim), linear_work(rows, hidden, dim, size, 1)
    yield contest("linear residual", shape, work, _linear_residual, _linear_residual_torch, (h, down, residual))
    shape, work = (rows, dim, dim), elementwise_work(rows, dim, size, 1)
    yield contest("rms_norm", shape, work, rms_norm, rms_norm_torch, (x, weight), eps=eps)


def _ways(
    fused: Callable[..., Tensor], eager: Callable[..., Tensor], operands: Sequence[Tensor], is_compiled_too: bool
) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {"eager": partial(eager, *operands), "triton": partial(fused, *operands)}
    if is_compiled_too:
        ways["compiled"] = partial(torch.compile(eager, dynamic=False, fullgraph=True), *operands)
    return ways


def _mlp(activation: str, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear(gated_linear(x, gate, up, activation=activation), down)


def _mlp_torch(activation: str, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return linear_torch(gated_linear_torch(x, gate, up, activation=activation), down)


def _linear_residual(h: Tensor, down: Tensor, residual: Tensor) -> Tensor:
    return linear(h, down, residual=residual)


def _linear_residual_torch(h: Tensor, down: Tensor, residual: Tensor) -> Tensor:
    return linear_torch(h, down, residual=residual)


def _liger(name: str, gate: Tensor, up: Tensor, down: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return Liger's module `name` with these weights, where it is installed.

    Source: https://github.com/linkedin/Liger-Kernel, src/liger_kernel/transformers.
    """
    if liger_version() is None:
        return None
    hidden, dim = gate.shape
    act = {"gelu_tanh": "gelu_pytorch_tanh"}.get(LIGER_ACTIVATIONS[name], LIGER_ACTIVATIONS[name])
    module = getattr(importlib.import_module("liger_kernel.transformers"), name)
    with torch.device("meta"):
        mlp = module(SimpleNamespace(hidden_size=dim, intermediate_size=hidden, hidden_act=act))
    weights = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
    mlp.load_state_dict(weights, assign=True)
    called: Callable[[Tensor], Tensor] = mlp
    return called


def liger_version() -> str | None:
    """Return the version of liger-kernel, None where it is not installed."""
    try:
        return metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return None


def liger_state(device: torch.device) -> str:
    """Say whether Liger's MLP is among the rows, and if not, why."""
    if device.type != "cuda":
        return "not measured: it is for GPUs"
    version = liger_version()
    return "not installed: pip install liger-kernel" if version is None else f"measured, version {version}"


def document(device: torch.device, roof: Roof, measured: Sequence[Row]) -> dict[str, Any]:
    """Put the results together with their conditions, ready for JSON."""
    return {
        "conditions": conditions(device),
        "liger": liger_state(device),
        "roof": roof_record(roof),
        "rows": [each.record() for each in measured],
    }
