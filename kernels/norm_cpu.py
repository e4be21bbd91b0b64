"""RMSNorm on a CPU in fewer passes than PyTorch's chain of six operators.

The row's scale is one reduction and one hypotenuse: ``sqrt(mean(x^2) + eps) = hypot(|x|, sqrt(n eps)) / sqrt(n)``, with
``sqrt(n)`` folded into the weight. Measured by `python -m kernels bench`, docs/results/onednn.json.
"""

import math

import torch
from torch import Tensor

from kernels.dtypes import DTYPES


class RMSNormCPU:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Sums are float32; results are rounded to `dtype` once. The weight is copied: later changes do not reach it.

    Args:
        weight: (n,), float32, bfloat16 or float16, on the CPU.
        eps: added to the mean of squares, not negative.

    Raises:
        ValueError: the weight is not one dimension of at least one element on the CPU, or `eps` is negative.
        TypeError: the dtype is not one of these three.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """

    __slots__ = ("_eps", "_weight", "dtype", "features")

    def __init__(self, weight: Tensor, eps: float) -> None:
        if weight.dtype not in DTYPES.values():
            raise TypeError(f"RMSNormCPU: weight must be float32, bfloat16 or float16, got {weight.dtype}")
        if weight.ndim != 1 or weight.numel() == 0 or weight.device.type != "cpu":
            raise ValueError(
                f"RMSNormCPU: weight must be (n,), n > 0, on the CPU, got {tuple(weight.shape)} on {weight.device}"
            )
        if not eps >= 0:
            raise ValueError(f"RMSNormCPU: eps must not be negative, got {eps}")
        self.dtype = weight.dtype
        self.features = weight.numel()
        self._weight = weight.detach().float() * math.sqrt(self.features)
        self._eps = torch.tensor(math.sqrt(self.features * eps), dtype=torch.float32).view(1)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise rows.

        Args:
            x: (..., n), dtype of the weight, any strides.

        Returns:
            (..., n), a new tensor, dtype of the weight. A row that holds NaN becomes NaN; in one that holds infinity,
            infinity becomes NaN and the rest 0.

        Raises:
            ValueError: wrong width or device.
            TypeError: wrong dtype.
        """
        if x.ndim == 0 or x.size(-1) != self.features:
            raise ValueError(f"RMSNormCPU: x must be (..., {self.features}), got {tuple(x.shape)}")
        if x.dtype is not self.dtype:
            raise TypeError(f"RMSNormCPU: x must be {self.dtype} as the weight is, got {x.dtype}")
        if not x.is_cpu:
            raise ValueError(f"RMSNormCPU: x must be on the CPU, got {x.device}")
        if self.dtype is torch.float32:
            return (x / self._scale(x)).mul_(self._weight)
        wide = x.float()
        scale = self._scale(wide)
        return wide.div_(scale).mul_(self._weight).to(self.dtype)

    def _scale(self, x: Tensor) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(x, 2, -1, True)  # (..., 1)
        return norm.hypot_(self._eps)
