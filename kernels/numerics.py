"""The rule by which a fused operator is accepted, for the tests and for `python -m kernels check`."""

import math

import torch
from torch import Tensor

FLOAT32_ROUNDING = torch.finfo(torch.float32).eps


def disagreement(fused: Tensor, eager: Tensor, exact: Tensor, roundings: float = 1.0) -> str | None:
    """Apply ``|fused - exact| <= 2 |eager - exact| + tiny``, once by the largest and once by the rms error.

    ``tiny`` is one float32 rounding of the largest (or rms) exact value, or as many as `roundings` says: sums are
    float32, and short sums differ between the two sides only by the order of summation.

    Args:
        fused: result under test, any shape, any floating dtype.
        eager: the same computed by PyTorch's own operators; shape and dtype of `fused`.
        exact: the same computed in float64 from the same (rounded) inputs; finite.
        roundings: how many float32 roundings the two sides may be apart because of the order alone: see `chain` for a
            long sum; a whole model has one for each of its products.

    Returns:
        None if the rule holds, else a sentence with both errors. NaN in `fused` never passes.

    Raises:
        ValueError: `exact` or `eager` is not finite, or `exact` has another shape than `eager`.
        TypeError: `exact` is not float64.

    Source: the bound of quack's tests, https://github.com/Dao-AILab/quack, against float64 and with an rms error beside
    the largest: the largest shows one wrong element, the rms a small error in all of them.
    """
    if exact.dtype != torch.float64:
        raise TypeError(f"disagreement: exact must be float64, got {exact.dtype}")
    if exact.shape != eager.shape:
        raise ValueError(f"disagreement: exact has shape {tuple(exact.shape)}, eager {tuple(eager.shape)}")
    if not (bool(exact.isfinite().all()) and bool(eager.isfinite().all())):
        raise ValueError("disagreement: exact and eager must be finite; compare NaN and infinity by position instead")
    if fused.shape != eager.shape or fused.dtype != eager.dtype:
        return f"fused is {fused.dtype} {tuple(fused.shape)}, eager is {eager.dtype} {tuple(eager.shape)}"
    if exact.numel() == 0:
        return None
    fused_error, eager_error = fused.double() - exact, eager.double() - exact
    tiny = FLOAT32_ROUNDING * roundings
    for name, measure in (("largest", _largest), ("rms", _rms)):
        got, allowed = measure(fused_error), 2 * measure(eager_error) + tiny * measure(exact)
        if not got <= allowed:  # so written, NaN fails
            return f"{name} error {got:.3e} exceeds {allowed:.3e}; eager's is {measure(eager_error):.3e}"
    return None


def chain(terms: int) -> float:
    """Return how many roundings a float32 sum of `terms` one after the other may differ from a sum in blocks.

    Source: Higham and Mary 2019, https://doi.org/10.1137/18M1226312: the error of a chain grows as ``sqrt(n)`` half
    roundings.
    """
    return max(1.0, math.sqrt(terms) / 2)


def _largest(values: Tensor) -> float:
    return float(values.abs().max())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
