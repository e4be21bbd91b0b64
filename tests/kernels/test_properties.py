"""Properties of every operator over rows, widths, strides, offsets and dtypes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.activation import ACTIVATIONS, gated_activation, gated_activation_torch
from kernels.gated_linear import gated_linear, gated_linear_torch
from kernels.linear import linear, linear_torch
from kernels.norm import layer_norm, layer_norm_torch, rms_norm, rms_norm_torch
from kernels.numerics import chain, disagreement
from kernels.rms_gated_linear import fold_norm, rms_gated_linear, rms_gated_linear_torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS, WIDTHS = st.integers(0, 40), st.integers(1, 96)
dtypes, activations, seeds = st.sampled_from(DTYPES), st.sampled_from(list(ACTIVATIONS)), st.integers(0, 2**20)

# Of a single element eager's error may by chance be next to none: sums are allowed what chains of their length are, two
# of them where there are two products.
layouts = st.tuples(st.integers(1, 3), st.integers(0, 9), st.integers(0, 7))  # step of rows, columns before, and after

pytestmark = pytest.mark.slow

few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def laid_out(tensor: Tensor, layout: tuple[int, int, int]) -> Tensor:
    """Copy a matrix into every so-many-th row of a wider one of NaN, some columns in."""
    step, before, after = layout
    rows, width = tensor.shape
    shape = rows * step, before + width + after
    wide: Tensor = torch.full(shape, torch.nan, dtype=tensor.dtype, device=tensor.device)
    return wide[::step, before : before + width].copy_(tensor)


def normal(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.25
    return values.to(DEVICE, dtype)


@few
@given(ROWS, WIDTHS, dtypes, activations, layouts, layouts, seeds)
def test_gated_activation(
    rows: int,
    width: int,
    dtype: torch.dtype,
    activation: str,
    gate_layout: tuple[int, int, int],
    up_layout: tuple[int, int, int],
    seed: int,
) -> None:
    gate, up = (normal(seed + at, dtype, rows, width) for at in range(2))
    result = gated_activation(laid_out(gate, gate_layout), laid_out(up, up_layout), activation)
    eager = gated_activation_torch(gate, up, activation)
    assert disagreement(result, eager, gated_activation_torch(gate.double(), up.double(), activation)) is None


@few
@given(ROWS, WIDTHS, WIDTHS, dtypes, activations, layouts, layouts, st.booleans(), seeds)
def test_gated_linear(
    rows: int,
    width: int,
    out: int,
    dtype: torch.dtype,
    activation: str,
    x_layout: tuple[int, int, int],
    weight_layout: tuple[int, int, int],
    has_bias: bool,
    seed: int,
) -> None:
    x, gate, up = (normal(seed + at, dtype, count, width) for at, count in enumerate((rows, out, out)))
    biases = [normal(seed + 3, dtype, out), normal(seed + 4, dtype, out)] if has_bias else []
    operands = laid_out(x, x_layout), laid_out(gate, weight_layout), laid_out(up, (2, 1, 0))
    result = gated_linear(*operands, *biases, activation=activation)
    exact = gated_linear_torch(*(each.double() for each in (x, gate, up, *biases)), activation=activation)
    assert (
        disagreement(result, gated_linear_torch(x, gate, up, *biases, activation=activation), exact, chain(4 * width))
        is None
    )


@few
@given(ROWS, st.integers(2, 96), WIDTHS, dtypes, activations, layouts, layouts, st.booleans(), seeds)
def test_rms_gated_linear(
    rows: int,
    width: int,
    out: int,
    dtype: torch.dtype,
    activation: str,
    x_layout: tuple[int, int, int],
    weight_layout: tuple[int, int, int],
    has_bias: bool,
    seed: int,
) -> None:
    x, gate, up = (normal(seed + at, dtype, count, width) for at, count in enumerate((rows, out, out)))
    norm_weight = 1 + normal(seed + 5, dtype, width)
    biases = [normal(seed + 3, dtype, out), normal(seed + 4, dtype, out)] if has_bias else []
    folded = laid_out(fold_norm(gate, norm_weight), weight_layout), laid_out(fold_norm(up, norm_weight), (2, 1, 0))
    result = rms_gated_linear(laid_out(x, x_layout), *folded, *biases, eps=1e-3, activation=activation)
    exact, eager = (
        rms_gated_linear_torch(*operands, eps=1e-3, activation=activation, norm_weight=stored)
        for *operands, stored in (
            [each.double() for each in (x, gate, up, *biases, norm_weight)],
            (x, gate, up, *biases, norm_weight),
        )
    )
    assert disagreement(result, eager, exact, chain(4 * width)) is None


@few
@given(ROWS, WIDTHS, WIDTHS, dtypes, st.none() | activations, layouts, layouts, st.booleans(), seeds)
def test_linear(
    rows: int,
    width: int,
    out: int,
    dtype: torch.dtype,
    activation: str | None,
    x_layout: tuple[int, int, int],
    weight_layout: tuple[int, int, int],
    has_residual: bool,
    seed: int,
) -> None:
    x, weight, bias = (
        normal(seed, dtype, rows, width),
        normal(seed + 1, dtype, out, width),
        normal(seed + 2, dtype, out),
    )
    residual = normal(seed + 3, dtype, rows, out) if has_residual else None
    strided = None if residual is None else laid_out(residual, x_layout)
    operands = laid_out(x, x_layout), laid_out(weight, weight_layout), bias
    result = linear(*operands, activation=activation, residual=strided)
    exact_residual = None if residual is None else residual.double()
    exact = linear_torch(x.double(), weight.double(), bias.double(), activation=activation, residual=exact_residual)
    eager = linear_torch(x, weight, bias, activation=activation, residual=residual)
    assert disagreement(result, eager, exact, chain(4 * width)) is None


@few
@given(ROWS, WIDTHS, dtypes, layouts, st.booleans(), st.booleans(), seeds)
def test_norms(
    rows: int,
    width: int,
    dtype: torch.dtype,
    layout: tuple[int, int, int],
    is_centered: bool,
    has_residual: bool,
    seed: int,
) -> None:
    if is_centered and width == 1:
        width = 2  # one number less its mean is nothing, and what is left is rounding
    x, weight = normal(seed, dtype, rows, width), normal(seed + 1, dtype, width)
    residual = normal(seed + 2, dtype, rows, width) if has_residual else None
    strided = None if residual is None else laid_out(residual, layout)
    fused, reference = (layer_norm, layer_norm_torch) if is_centered else (rms_norm, rms_norm_torch)
    result = fused(laid_out(x, layout), weight, eps=1e-3, residual=strided)
    exact_residual = None if residual is None else residual.double()
    exact = reference(x.double(), weight.double(), eps=1e-3, residual=exact_residual)
    assert disagreement(result, reference(x, weight, eps=1e-3, residual=residual), exact) is None
