"""The conditions of a measurement: what has to stand beside a figure for it to mean anything."""

import os
import platform

import torch

from kernels.conditions import commit, processor, triton_version
from kernels.dtypes import name_of


def conditions(device: torch.device, dtype: torch.dtype, threads: int) -> dict[str, str | int]:
    """Return hardware, versions, commit and how PyTorch was set; `+` after the commit says that the tree had changes.

    `device` is the GPU's name where there is one, else "cpu".
    """
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": threads,
        "dtype": name_of(dtype),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "commit": commit(),
    }


def described(facts: dict[str, str | int]) -> str:
    """Return what `conditions` found as one line of text."""
    device = "" if facts["device"] == "cpu" else f"{facts['device']}, "
    return (
        f"{device}{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, {facts['dtype']}, "
        f"torch {facts['torch']}, triton {facts['triton']}, python {facts['python']}, commit {facts['commit']}"
    )
