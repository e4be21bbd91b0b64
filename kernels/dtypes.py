"""The dtypes of operands: those that there are kernels for."""

import torch

from kernels.names import DTYPE_NAMES

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


def name_of(dtype: torch.dtype) -> str:
    """Return what flags, tables and JSON call a dtype, say "bfloat16"."""
    return str(dtype).removeprefix("torch.")
