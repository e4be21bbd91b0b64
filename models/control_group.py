"""What this process may use of its machine: cores and memory, within the limits of its control group.

Both versions of control groups are read, where a container sees its own: version 2, and of version 1 the controllers.
"""

import os
from pathlib import Path

CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, capped by the control group's CPU quota.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files, and of version 1
    https://docs.kernel.org/scheduler/sched-bwc.html#management.
    """
    cores = len(os.sched_getaffinity(0))
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join(_limit(name) for name in names).split()
        except (OSError, ValueError):
            continue
        return cores if quota in ("max", "-1") else max(1, min(cores, int(quota) // int(period)))
    return cores


def memory_bytes() -> int:
    """Return how much memory there is for this process: the machine's, or its control group's where that is less.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files, and of version 1
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, whose limit is beyond any memory where none is set.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            limit = _limit(name)
        except OSError:
            continue
        return min(total, int(limit)) if limit.isdecimal() else total
    return total


def _limit(name: str) -> str:
    return (CONTROL_GROUP / name).read_text(encoding="ascii").strip()
