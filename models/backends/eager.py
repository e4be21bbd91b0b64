"""The baseline: the module as it is written, one PyTorch operator after another."""

import torch
from torch import Tensor

from models.backends import Backend
from models.errors import first_line


class Eager(Backend):
    """Runs the module itself, on any device."""

    implementation = "torch"

    @classmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Try a product in `dtype`, which not every device multiplies."""
        ones = torch.ones(2, 2, dtype=dtype, device=device)
        try:
            torch.nn.functional.linear(ones, ones)
        except (RuntimeError, NotImplementedError) as error:
            return f"torch {torch.__version__} does not multiply {dtype} on {device}: {first_line(error)}"
        return None

    def __call__(self, x: Tensor) -> Tensor:
        """See `Backend`."""
        y: Tensor = self.model(x)
        return y
