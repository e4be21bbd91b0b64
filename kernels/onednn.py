"""The linear layer's CPU fusions: oneDNN post-ops on a weight packed once.

They run while the product's tile is still in registers, so the activation, the gate's product and the residual add
move no bytes of their own. The operators are private to PyTorch: ask `unavailable` before building on them.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernels.dtypes import DTYPES

# One packing serves all row counts: docs/results/onednn.json has it within 4% of the best at each of them, from 1 to
# 256, in float32 and bfloat16, and within 0.6% in the mean. Packed for 64 rows, 1 row took up to 1.2 times as long;
# packed for 1 row, 1.8 times.
PACKING_ROWS = 256

# Names are the models'; the pair is oneDNN's (attribute, algorithm).
ACTIVATIONS = {"gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "silu": ("swish", ""), "relu": ("none", "")}

IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "gelu_tanh": partial(torch.ops.aten.gelu_.default, approximate="tanh"),
    "silu": torch.ops.aten.silu_.default,
    "relu": torch.relu_,
}


@cache
def unavailable(dtype: torch.dtype = torch.float32) -> str | None:
    """Say why the fusions cannot run here in `dtype`, or None where they can.

    Looks for the operators, then runs each on a few numbers and compares with float64. Probed once per dtype.
    """
    if dtype not in DTYPES.values():
        return f"oneDNN post-ops take float32, bfloat16 or float16, not {dtype}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return f"torch {torch.__version__} was built without oneDNN"
    for name in ("_linear_pointwise", "_reorder_linear_weight"):
        if not hasattr(torch.ops.mkldnn, name):
            return f"torch {torch.__version__} has no operator mkldnn::{name}"
    if not hasattr(torch.ops.mkldnn._linear_pointwise, "binary"):
        return f"torch {torch.__version__} has no operator mkldnn::_linear_pointwise.binary"
    try:
        wrong = _wrong_fusion(dtype)
    except (RuntimeError, NotImplementedError) as error:
        return f"oneDNN post-ops do not run in {dtype} on this CPU: {str(error).partition(chr(10))[0]}"
    if wrong is not None:
        return f"the oneDNN post-op {wrong} of torch {torch.__version__} disagrees with float64 in {dtype} on this CPU"
    return None


def plain_rows(dtype: torch.dtype, in_features: int, out_features: int, has_activation: bool) -> int:
    """Return up to how many rows PyTorch's own product and a pass in place are faster than oneDNN's call.

    A oneDNN call costs some 15 us before it multiplies. By docs/results/onednn.json, in float32 the plain way wins up
    to 250,000 multiplications if the weight has fewer than 262,144 elements. Without an activation, whose pass costs
    as much as the call saves, it wins up to 1,000,000 multiplications if the weight has at most 65,536 elements. In
    bfloat16 it wins only for 1 row of the smallest weights.
    """
    elements = in_features * out_features
    if dtype != torch.float32:
        return 1 if elements <= 8_192 else 0
    if elements >= 262_144:
        return 0
    return (250_000 if has_activation or elements > 65_536 else 1_000_000) // elements


def _wrong_fusion(dtype: torch.dtype) -> str | None:
    x, weight, bias, other = (
        torch.linspace(-2, 3, steps, dtype=torch.float64, device="cpu").sin().to(dtype) for steps in (15, 35, 7, 21)
    )
    x, weight, other = x.view(3, 5), weight.view(7, 5), other.view(3, 7)
    kept = other.clone()
    with torch.no_grad():
        exact = torch.addmm(bias.double(), x.double(), weight.double().T)  # (3, 7)
        packed = packed_weight(weight, PACKING_ROWS)
        results = {
            "none": (fused_linear(x, packed, bias, "none", ""), exact),
            "gelu": (fused_linear(x, packed, bias, "gelu", "none"), torch.nn.functional.gelu(exact)),
            "gelu tanh": (
                fused_linear(x, packed, bias, "gelu", "tanh"),
                torch.nn.functional.gelu(exact, approximate="tanh"),
            ),
            "swish": (fused_linear(x, packed, bias, "swish", ""), torch.nn.functional.silu(exact)),
            "mul": (fused_linear_binary(x, other, packed, bias, "mul"), exact * kept),
            "add": (fused_linear_binary(x, other, packed, bias, "add"), exact + kept),
        }
    # float32 tells erf from tanh GELU here: they are 5e-4 apart at most, its rounding is 1e-7.
    tolerance = 8 * torch.finfo(dtype).eps
    for name, (result, expected) in results.items():
        if result.dtype != dtype or not torch.allclose(result.double(), expected, rtol=tolerance, atol=tolerance):
            return name
    return None if torch.equal(other, kept) else "mul or add, which overwrites its operand,"


def packed_weight(weight: Tensor, rows: int) -> Tensor:
    """Pack a weight, (out, in), into the blocked layout that oneDNN prefers for `rows` rows."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return packed


def fused_linear(x: Tensor, packed: Tensor, bias: Tensor | None, attribute: str, algorithm: str) -> Tensor:
    """Compute ``act(x W' + b)`` of unchecked operands; the activation is a pair in `ACTIVATIONS`, or "none" and ""."""
    scalars: Sequence[Any] = ()
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, attribute, scalars, algorithm)
    return result


def fused_linear_binary(x: Tensor, other: Tensor, packed: Tensor, bias: Tensor | None, attribute: str) -> Tensor:
    """Compute ``(x W' + b) * other`` or ``other + x W' + b`` of unchecked operands; `attribute` is "mul" or "add"."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, packed, bias, attribute)
    return result


class PackedLinear:
    """A linear layer for inference on CPU whose weight is packed once into oneDNN's blocked layout.

    Results are rounded to `dtype` once, after the post-op; sums are float32. Operands are never written to, may be
    strided, and may have any number of rows, none included. The packed weight is a copy: later changes to `weight` do
    not reach it. Products too small to repay oneDNN's call (see `plain_rows`) are PyTorch's own, with the post-op done
    in place.

    Args:
        weight: (out, in), float32, bfloat16, or float16 where the CPU multiplies it; as `torch.nn.Linear` holds it.
        bias: (out,), dtype of `weight`.

    Raises:
        ValueError: a shape is wrong, a width is zero, or a tensor is not on the CPU.
        TypeError: the dtype is not one of the three, or bias and weight differ in dtype.
        RuntimeError: oneDNN cannot do it here, for the reason that `unavailable` gives.

    Source: PyTorch's own use of the operators, torch/_inductor/fx_passes/mkldnn_fusion.py.
    """

    __slots__ = (
        "_bias",
        "_packed",
        "_plain",
        "_plain_activated_elements",
        "_plain_elements",
        "dtype",
        "in_features",
        "out_features",
    )

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        if weight.dtype not in DTYPES.values():
            raise TypeError(f"PackedLinear: weight must be float32, bfloat16 or float16, got {weight.dtype}")
        if weight.ndim != 2 or 0 in weight.shape:
            raise ValueError(f"PackedLinear: weight must be (out, in), neither zero, got {tuple(weight.shape)}")
        if weight.device.type != "cpu":
            raise ValueError(f"PackedLinear: weight must be on the CPU, got {weight.device}")
        self.dtype = weight.dtype
        self.out_features, self.in_features = weight.shape
        if bias is not None:
            self._check("bias", bias, (self.out_features,))
        reason = unavailable(weight.dtype)
        if reason is not None:
            raise RuntimeError(f"PackedLinear: {reason}")
        self._packed = packed_weight(weight.detach(), PACKING_ROWS)
        # Compared with x.numel(), which spares a division; rows are few, so the copy is small as well.
        self._plain_elements, self._plain_activated_elements = (
            plain_rows(weight.dtype, self.in_features, self.out_features, has_activation) * self.in_features
            for has_activation in (False, True)
        )
        self._plain = weight.detach().clone(memory_format=torch.contiguous_format).T if self._plain_elements else None
        self._bias = None if bias is None else bias.detach().clone(memory_format=torch.contiguous_format)

    def __call__(self, x: Tensor, activation: str | None = None) -> Tensor:
        """Compute ``act(x W' + b)``.

        Args:
            x: (..., in), dtype of the weight.
            activation: None, "gelu" (erf), "gelu_tanh", "silu" or "relu".

        Returns:
            (..., out), a new tensor, dtype of the weight.

        Raises:
            ValueError: wrong width or device, or unknown activation.
            TypeError: wrong dtype.
            RuntimeError: a gradient through `x` is asked for.
        """
        self._check_input(x)
        if activation is not None and activation not in ACTIVATIONS:
            raise ValueError(
                f"PackedLinear: activation must be None or one of {', '.join(ACTIVATIONS)}, got {activation!r}"
            )
        if activation is None:
            if self._plain is not None and x.numel() <= self._plain_elements:
                return self._plain_product(x, self._plain)
            return fused_linear(x, self._packed, self._bias, "none", "")
        if self._plain is not None and x.numel() <= self._plain_activated_elements:
            return IN_PLACE[activation](self._plain_product(x, self._plain))
        attribute, algorithm = ACTIVATIONS[activation]
        result = fused_linear(x, self._packed, self._bias, attribute, algorithm)
        # oneDNN's relu makes NaN 0, which would hide it; this pass over a result still in cache costs under 1%.
        return result.relu_() if activation == "relu" else result

    def mul(self, x: Tensor, other: Tensor) -> Tensor:
        """Compute ``(x W' + b) * other``.

        Args:
            x: (..., in), dtype of the weight.
            other: (..., out), leading dimensions and dtype of `x`.

        Returns:
            (..., out), a new tensor, dtype of the weight.

        Raises:
            ValueError: wrong shape or device.
            TypeError: wrong dtype.
            RuntimeError: a gradient through `x` or `other` is asked for.
        """
        return self._binary(x, "other", other, "mul")

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Compute ``residual + x W' + b``.

        Args:
            x: (..., in), dtype of the weight.
            residual: (..., out), leading dimensions and dtype of `x`.

        Returns:
            (..., out), a new tensor, dtype of the weight.

        Raises:
            ValueError: wrong shape or device.
            TypeError: wrong dtype.
            RuntimeError: a gradient through `x` or `residual` is asked for.
        """
        return self._binary(x, "residual", residual, "add")

    @property
    def copied_bytes(self) -> int:
        """Bytes held besides the weight and bias that this was made from, without padding of the blocked layout."""
        weight = self.in_features * self.out_features * self.dtype.itemsize
        bias = 0 if self._bias is None else self._bias.nbytes
        return (weight if self._plain is None else 2 * weight) + bias

    def __repr__(self) -> str:
        bias = self._bias is not None
        return (
            f"PackedLinear(in_features={self.in_features}, out_features={self.out_features}, bias={bias}, {self.dtype})"
        )

    def _binary(self, x: Tensor, name: str, operand: Tensor, attribute: str) -> Tensor:
        self._check_input(x)
        # oneDNN reads past an operand that is too small, without a word.
        if not (self._is_plainly_right(operand, self.out_features) and operand.size(0) == x.size(0) and x.ndim == 2):
            self._check(name, operand, (*x.shape[:-1], self.out_features))
        if self._plain is not None and x.numel() <= self._plain_elements:
            product = self._plain_product(x, self._plain)
            return product.mul_(operand) if attribute == "mul" else product.add_(operand)
        return fused_linear_binary(x, operand, self._packed, self._bias, attribute)

    def _plain_product(self, x: Tensor, weight: Tensor) -> Tensor:  # weight: (in, out)
        if x.ndim != 2:
            return linear(x, weight.T, self._bias)
        return torch.mm(x, weight) if self._bias is None else torch.addmm(self._bias, x, weight)

    def _is_plainly_right(self, tensor: Tensor, features: int) -> bool:
        """Say whether the usual operand is right, in a fraction of the time that finding what is wrong takes."""
        return (
            tensor.ndim == 2
            and tensor.size(1) == features
            and tensor.dtype is self.dtype
            and tensor.is_cpu
            and not tensor.requires_grad
        )

    def _check_input(self, x: Tensor) -> None:
        if self._is_plainly_right(x, self.in_features):
            return
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"PackedLinear: x must be (..., {self.in_features}), got {tuple(x.shape)}")
        self._check("x", x, x.shape)

    def _check(self, name: str, tensor: Tensor, shape: Sequence[int]) -> None:
        if tensor.shape != tuple(shape):
            raise ValueError(f"PackedLinear: {name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
        if tensor.dtype != self.dtype:
            raise TypeError(f"PackedLinear: {name} must be {self.dtype} as the weight is, got {tensor.dtype}")
        if tensor.device.type != "cpu":
            raise ValueError(f"PackedLinear: {name} must be on the CPU, got {tensor.device}")
        if name != "bias" and tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"PackedLinear: {name} asks for a gradient, which oneDNN post-ops do not give; use torch.no_grad()"
            )
