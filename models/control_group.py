"""What this process may use of its machine: cores and memory, within the limits of its control groups.

A group's limit applies to the groups inside it too, so what counts is the least of the limits of the process's own
group and of all above it. A container mostly sees its own group as the outermost. Both versions of control groups are
read.

Source: https://man7.org/linux/man-pages/man7/cgroups.7.html, "/proc/pid/cgroup".
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CONTROL_GROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_cores() -> int:
    """Return how many cores this process may use: its affinity, capped by the control groups' CPU quota.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files, and of version 1
    https://docs.kernel.org/scheduler/sched-bwc.html#management.
    """
    cores = len(os.sched_getaffinity(0))
    for group in _groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            try:
                quota, period = " ".join((group / name).read_text() for name in names).split()
            except (OSError, ValueError):
                continue
            if quota not in ("max", "-1"):
                cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def memory_bytes() -> int:
    """Return how much memory there is for this process: the machine's, or its control groups' where that is less.

    Source: https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files, and of version 1
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html, whose limit is beyond any memory where none is set.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            try:
                limit = (group / name).read_text().strip()
            except OSError:
                continue
            if limit.isdecimal():
                total = min(total, int(limit))
    return total


def _groups(controller: str) -> Iterator[Path]:
    """Yield the directories of the groups that this process is in, from the outermost that it sees.

    `controller` is version 1's name for what is shared out.
    """
    memberships = ["0::/", f"0:{controller}:/"]
    with contextlib.suppress(OSError):
        # A group's name may hold any bytes but a line's end.
        memberships += os.fsdecode(MEMBERSHIP.read_bytes()).removesuffix("\n").split("\n")
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = CONTROL_GROUP / controller if controllers else CONTROL_GROUP
        parts = PurePosixPath(path).parts[1:]
        for depth in range(len(parts) + 1):
            yield mount.joinpath(*parts[:depth])
