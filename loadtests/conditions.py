"""The conditions of a measurement: what has to stand beside a figure for it to mean anything."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORDS = ("docs/results", "README.md", "docs/measurements.md", "docs/peers.md")
"""What measuring writes: a series of measurements is of one commit although each leaves changes there."""
PACKAGES = ("torch", "litserve", "uvicorn", "uvloop", "httptools")


def conditions() -> dict[str, str | int]:
    """Return hardware, versions and commit; `+` after the commit says that the tree had changes, `RECORDS` aside."""
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
        "commit": commit(),
    }


def processor() -> str:
    """Return the processor's name as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def installed(name: str) -> str:
    """Return a package's installed version, or `none`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def commit() -> str:
    """Return the checked-out commit's short name, with `+` if the tree has changes, `RECORDS` aside."""
    git = ["git", "-C", str(ROOT)]
    status = [*git, "status", "--porcelain", "--", ".", *(f":(exclude){path}" for path in RECORDS)]
    try:
        name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        changes = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.strip() + ("+" if changes.strip() else "")


def told_commit(name: str) -> str:
    """Return a commit's name as a page shows it: its `+` in words."""
    return f"{name.removesuffix('+')} with uncommitted changes" if name.endswith("+") else name


def recorded(arguments: list[str]) -> list[str]:
    """Return the command line as a document keeps it: no `--key`, and no `--api-key` of a server that is started."""
    kept = ["python", "-m", "loadtests"]
    is_key = False
    for each in arguments:
        if not is_key:
            flag, equals, _ = each.partition("=")
            # Our flags are written in full; the server takes a part of a name as well.
            if flag == "--key" or (flag.startswith("--a") and "--api-key".startswith(flag)):
                is_key = not equals
                continue
            kept.append(each)
        is_key = False
    return kept
