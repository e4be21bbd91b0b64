"""Checks every operator against float64 on the device at hand, by the rule of `kernels.numerics`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels import onednn
from kernels.activation import ACTIVATIONS, gated_activation, gated_activation_torch
from kernels.dtypes import DTYPES, name_of
from kernels.gated_linear import gated_linear, gated_linear_torch
from kernels.interpreter import INTERPRETED
from kernels.linear import linear, linear_torch
from kernels.norm import layer_norm, layer_norm_torch, rms_norm, rms_norm_torch
from kernels.norm_cpu import RMSNormCPU
from kernels.numerics import chain, disagreement
from kernels.onednn import PackedLinear
from kernels.progress import Progress
from kernels.rms_gated_linear import fold_norm, rms_gated_linear, rms_gated_linear_torch

EPS = 1e-5

# Rows, in, out. The interpreter takes seconds for what a GPU takes microseconds.
SMALL_SHAPES = ((1, 19, 57), (17, 130, 33), (33, 64, 48))
LARGE_SHAPES = (*SMALL_SHAPES, (1, 768, 3072), (8, 3072, 768), (33, 768, 1001), (128, 768, 3072), (1024, 3072, 768))


class Check(NamedTuple):
    """One comparison.

    Args:
        op: the operator, with what is fused into it.
        implementation: "triton", "interpreter" (Triton's, on a CPU) or "onednn".
        dtype: of the operands.
        shape: rows, in, out.
        problem: None where the rule holds, else one sentence.
        skipped: None where it ran, else why it cannot here.
    """

    op: str
    implementation: str
    dtype: torch.dtype
    shape: tuple[int, int, int]
    problem: str | None = None
    skipped: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the comparison ready for JSON."""
        return {**self._asdict(), "dtype": name_of(self.dtype), "shape": list(self.shape)}


class _Case(NamedTuple):
    op: str
    fused: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    operands: tuple[Tensor | None, ...]


def check_all(device: torch.device, dtypes: Sequence[torch.dtype] = tuple(DTYPES.values())) -> list[Check]:
    """Check every operator that runs on `device`, in each of `dtypes`.

    On a CPU those are oneDNN's and, where Triton interprets, the kernels at small shapes.

    Raises:
        ValueError: the device is a GPU that is not there, or neither a GPU nor the CPU.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"check: device must be cpu or cuda, got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("check: no CUDA or ROCm GPU is present; use --device cpu")
    is_gpu = device.type == "cuda"
    shapes = LARGE_SHAPES if is_gpu else SMALL_SHAPES
    plans: list[tuple[str, torch.dtype, tuple[int, int, int]]] = []
    if is_gpu or INTERPRETED:
        plans += [("triton" if is_gpu else "interpreter", dtype, shape) for dtype in dtypes for shape in shapes]
    if not is_gpu:
        plans += [("onednn", dtype, shape) for dtype in dtypes for shape in LARGE_SHAPES[:-1]]
    checks: list[Check] = []
    with Progress("check", len(plans)) as progress, torch.no_grad():
        for implementation, dtype, shape in plans:
            checks += _check(implementation, dtype, shape, device)
            progress.step(f"{implementation} {dtype} {shape}")
    return checks


def _check(
    implementation: str, dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device
) -> Iterator[Check]:
    if implementation == "onednn":
        reason = onednn.unavailable(dtype)
        if reason is not None:
            yield Check("linear", implementation, dtype, shape, skipped=reason)
            return
    make = _onednn_cases if implementation == "onednn" else _triton_cases
    for case in make(dtype, shape, device):
        # float64 on the CPU: the reference does not depend on the device under test.
        exact = case.reference(*(None if each is None else each.cpu().double() for each in case.operands))
        eager, fused = case.reference(*case.operands), case.fused(*case.operands)
        # oneDNN sums float32 products in one chain over K; MKL, which is eager's, sums in blocks.
        roundings = chain(shape[1]) if implementation == "onednn" else 1.0
        problem = disagreement(fused.cpu(), eager.cpu(), exact, roundings)
        yield Check(case.op, implementation, dtype, shape, problem)


def _operands(dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device) -> dict[str, Tensor]:
    rows, width, out = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(sizes, generator=generator) * scale).to(device, dtype)

    return {
        "x": normal(rows, width),
        "weight": normal(out, width, scale=width**-0.5),
        "up_weight": normal(out, width, scale=width**-0.5),
        "bias": normal(out),
        "up_bias": normal(out),
        "residual": normal(rows, out),
        "gate": normal(rows, out),
        "norm_weight": normal(width),
        "norm_bias": normal(width),
        "norm_residual": normal(rows, width),
    }


def _triton_cases(dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device) -> Iterator[_Case]:
    o = _operands(dtype, shape, device)
    x, weight, bias, residual = o["x"], o["weight"], o["bias"], o["residual"]
    for activation in ACTIVATIONS:
        yield _Case(
            f"gated_activation {activation}",
            lambda gate, up, name=activation: gated_activation(gate, up, name),
            lambda gate, up, name=activation: gated_activation_torch(gate, up, name),
            (o["gate"], residual),
        )
        for biases in ((None, None), (bias, o["up_bias"])):
            yield _Case(
                f"gated_linear {activation}{' bias' * (biases[0] is not None)}",
                lambda *args, name=activation: gated_linear(*args, activation=name),
                lambda *args, name=activation: gated_linear_torch(*args, activation=name),
                (x, weight, o["up_weight"], *biases),
            )
            yield _Case(
                f"rms_gated_linear {activation}{' bias' * (biases[0] is not None)}",
                partial(_with_folded_norm, activation=activation),
                lambda norm, *args, name=activation: rms_gated_linear_torch(
                    *args, eps=EPS, activation=name, norm_weight=norm
                ),
                (o["norm_weight"], x, weight, o["up_weight"], *biases),
            )
        yield _Case(
            f"linear bias {activation}",
            lambda *args, name=activation: linear(*args, activation=name),
            lambda *args, name=activation: linear_torch(*args, activation=name),
            (x, weight, bias),
        )
    yield _Case("linear", linear, linear_torch, (x, weight))
    yield _Case(
        "linear bias residual",
        lambda x, weight, bias, residual: linear(x, weight, bias, residual=residual),
        lambda x, weight, bias, residual: linear_torch(x, weight, bias, residual=residual),
        (x, weight, bias, residual),
    )
    for added in (None, o["norm_residual"]):
        suffix = " residual" * (added is not None)
        yield _Case(
            f"rms_norm{suffix}",
            lambda x, weight, added: rms_norm(x, weight, eps=EPS, residual=added),
            lambda x, weight, added: rms_norm_torch(x, weight, eps=EPS, residual=added),
            (x, o["norm_weight"], added),
        )
        yield _Case(
            f"layer_norm{suffix}",
            lambda x, weight, bias, added: layer_norm(x, weight, bias, eps=EPS, residual=added),
            lambda x, weight, bias, added: layer_norm_torch(x, weight, bias, eps=EPS, residual=added),
            (x, o["norm_weight"], o["norm_bias"], added),
        )


def _with_folded_norm(
    norm_weight: Tensor, x: Tensor, gate_weight: Tensor, up_weight: Tensor, *biases: Tensor | None, activation: str
) -> Tensor:
    weights = fold_norm(gate_weight, norm_weight), fold_norm(up_weight, norm_weight)
    return rms_gated_linear(x, *weights, *biases, eps=EPS, activation=activation)


def _onednn_cases(dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device) -> Iterator[_Case]:
    o = _operands(dtype, shape, device)
    x, weight, bias, residual = o["x"], o["weight"], o["bias"], o["residual"]
    for activation in (None, *ACTIVATIONS):
        yield _Case(
            f"linear bias {activation or 'alone'}",
            lambda x, weight, bias, name=activation: PackedLinear(weight, bias)(x, name),
            lambda x, weight, bias, name=activation: linear_torch(x, weight, bias, activation=name),
            (x, weight, bias),
        )
    yield _Case(
        "linear bias residual",
        lambda x, weight, bias, residual: PackedLinear(weight, bias).add(x, residual),
        lambda x, weight, bias, residual: linear_torch(x, weight, bias, residual=residual),
        (x, weight, bias, residual),
    )
    yield _Case(
        "linear bias mul",
        lambda x, weight, bias, other: PackedLinear(weight, bias).mul(x, other),
        lambda x, weight, bias, other: linear_torch(x, weight, bias) * other,
        (x, weight, bias, residual),
    )
    yield _Case(
        "rms_norm",
        lambda x, weight: RMSNormCPU(weight, EPS)(x),
        lambda x, weight: rms_norm_torch(x, weight, eps=EPS),
        (x, o["norm_weight"]),
    )
