"""A fused backend that goes wrong when told."""

import torch
from torch import Tensor

from models.backends.fused import FusedOnCPU
from tests.service.rollout.planted_server import planted


class Planted(FusedOnCPU):
    """See planted_server.py."""

    @classmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run here: it is planted."""
        return "planted: the library is gone" if planted() == "missing" else super().unavailable_reason(device, dtype)

    def __call__(self, x: Tensor) -> Tensor:
        y = super().__call__(x)
        match planted():
            case "drift":
                return y * 1.5
            case "non_finite":
                return y * float("nan")
            case "fault":
                raise RuntimeError("planted: an illegal memory access")
        return y
