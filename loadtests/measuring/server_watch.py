"""What the server uses while it is under load: CPU and memory of all its processes, and the GPU."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

import gevent
import psutil
import pynvml

SAMPLE_EVERY_S = 0.25
LIST_EVERY_S = 2.0  # the server's processes: finding them reads every process of the host, a millisecond and more


class ServerWatch:
    """A context manager that afterwards says what was used within it."""

    def __init__(self, pid: int | None, has_gpu: bool = True) -> None:
        """`pid` is the server's first process, None where it runs on another host; `has_gpu`: it computes on one."""
        self.cpu: float | None = None  # cores in use
        self.other_cpu: float | None = None  # cores in use by neither the server nor this process and its children
        self.gpu: float | None = None  # share of the time
        self.memory: list[tuple[float, int]] = []  # seconds from the start, bytes resident
        self._root = None if pid is None else psutil.Process(pid)
        self._has_gpu = has_gpu
        self._gpu_shares: list[float] = []

    def __enter__(self) -> Self:
        """Begin."""
        self._began_s = time.monotonic()
        self._before = self._cpu_s()
        self._own_before = own_cpu_s() if self._before else {}
        self._host_before_s = busy_s()
        self._sampler = gevent.spawn(self._sample)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End."""
        self._sampler.kill()
        after, seconds = self._cpu_s(), time.monotonic() - self._began_s
        if after and seconds > 0:
            own = self._own_before | self._before
            both = own_cpu_s() | after
            host_s = busy_s() - self._host_before_s
            self.cpu = sum(used - self._before.get(process, 0.0) for process, used in after.items()) / seconds
            self.other_cpu = max(0.0, host_s - sum(used - own.get(each, 0.0) for each, used in both.items())) / seconds
        if self._gpu_shares:
            self.gpu = sum(self._gpu_shares) / len(self._gpu_shares)

    def _tree(self) -> list[psutil.Process]:
        if self._root is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def _cpu_s(self) -> dict[psutil.Process, float]:
        return cpu_s(self._tree())

    def _sample(self) -> None:
        read_gpu = gpu_reader() if self._root is not None and self._has_gpu else None
        processes: list[psutil.Process] = []
        listed_s = -LIST_EVERY_S
        while True:
            after_s = time.monotonic() - self._began_s
            if after_s - listed_s >= LIST_EVERY_S:
                processes, listed_s = self._tree(), after_s
            if processes:
                self.memory.append((after_s, resident(processes)))
            if read_gpu is not None:
                share = gevent.get_hub().threadpool.apply(read_gpu)
                if isinstance(share, float):
                    self._gpu_shares.append(share)
                else:
                    print(f"GPU use is not watched any longer in this run: {share}", file=sys.stderr)
                    self._gpu_shares, read_gpu = [], None
            gevent.sleep(SAMPLE_EVERY_S)


def cpu_s(processes: Iterable[psutil.Process]) -> dict[psutil.Process, float]:
    """Return the CPU seconds of the processes that still exist."""
    used = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            used[process] = times.user + times.system
    return used


def resident(processes: Iterable[psutil.Process]) -> int:
    """Return the resident bytes of the processes that still exist."""
    sizes = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            sizes += process.memory_info().rss
    return sizes


def own_cpu_s() -> dict[psutil.Process, float]:
    """Return the CPU seconds of this process and its children, the generator's among them."""
    this = psutil.Process()
    return cpu_s([this, *this.children(recursive=True)])


def busy_s() -> float:
    """Return the CPU seconds that all processes of this host have used, interrupts and what other guests took included.

    Source: https://docs.kernel.org/filesystems/proc.html, /proc/stat; a guest's time is part of user's.
    """
    times = psutil.cpu_times()
    return sum(float(getattr(times, name)) for name in ("user", "nice", "system", "irq", "softirq", "steal"))


def busy_cores(seconds: float) -> float:
    """Return how many cores of this host all processes but this one use, measured for so long."""
    began_s, host_s, own = time.monotonic(), busy_s(), own_cpu_s()
    time.sleep(seconds)
    used_s = busy_s() - host_s - (sum(own_cpu_s().values()) - sum(own.values()))
    return max(0.0, used_s) / (time.monotonic() - began_s)


@functools.cache
def gpu_reader() -> Callable[[], float | pynvml.NVMLError] | None:
    """Return a function that reads the share of time that this host's busiest GPU is in use, by whatever process.

    If it can no longer be read, the function returns the error, since gevent's threads would print a raised one.

    None if there is no NVIDIA GPU, or none can be read. Those that cannot are named on stderr, once per process: a GPU
    that is split by MIG does not report its use.

    Source: https://docs.nvidia.com/deploy/nvml-api, nvmlDeviceGetUtilizationRates.
    """
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return None
    except pynvml.NVMLError as error:
        print(f"GPU use is not watched: {error}", file=sys.stderr)
        return None
    devices = []
    for index in range(count):
        try:
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            pynvml.nvmlDeviceGetUtilizationRates(device)
        except pynvml.NVMLError as error:
            print(f"the use of GPU {index} is not watched: {error}", file=sys.stderr)
        else:
            devices.append(device)
    if not devices:
        return None

    def read() -> float | pynvml.NVMLError:
        try:
            return max(float(pynvml.nvmlDeviceGetUtilizationRates(each).gpu) for each in devices) / 100
        except pynvml.NVMLError as error:
            return error

    return read
