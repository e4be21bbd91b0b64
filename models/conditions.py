"""The conditions of a measurement: what has to stand beside a figure for it to mean anything."""

import os
import platform
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def conditions(device: torch.device, dtype: torch.dtype, threads: int) -> dict[str, str | int]:
    """Return hardware, versions, commit and how PyTorch was set; `+` after the commit says that the tree had changes.

    `device` is the GPU's name where there is one, else "cpu".
    """
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": threads,
        "dtype": str(dtype).removeprefix("torch."),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton(),
        "commit": commit(),
    }


def described(facts: dict[str, str | int]) -> str:
    """Return what `conditions` found as one line of text."""
    device = "" if facts["device"] == "cpu" else f"{facts['device']}, "
    return (
        f"{device}{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads, {facts['dtype']}, "
        f"torch {facts['torch']}, triton {facts['triton']}, python {facts['python']}, commit {facts['commit']}"
    )


def processor() -> str:
    """Return the processor's name as the operating system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the checked-out commit's short name, `unknown` outside of a checkout."""
    git = ["git", "-C", str(ROOT)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + ("+" if changes.strip() else "")


def _triton() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)
