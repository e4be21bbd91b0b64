"""The conditions of a measurement: what has to stand beside a figure for it to mean anything."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
RECORDS = ("docs/results", "README.md", "docs/measurements.md", "docs/peers.md")
"""What measuring writes: a series of measurements is of one commit although each leaves changes there."""


def conditions(device: torch.device) -> dict[str, Any]:
    """Return the device, versions, commit and date; `+` after the commit says that the tree had changes."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton_version(),
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def processor() -> str:
    """Return the processor's name as the operating system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the checked-out commit's short name, with `+` if the tree has changes, `RECORDS` aside.

    It is `unknown` outside a checkout.
    """
    git = ["git", "-C", str(ROOT)]
    status = [*git, "status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in RECORDS)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changes = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + ("+" if changes.strip() else "")


def triton_version() -> str:
    """Return Triton's version, or `none` where it is not installed."""
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)
