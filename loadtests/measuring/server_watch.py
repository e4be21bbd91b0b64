"""What the server uses while it is under load: CPU and memory of all its processes, and the GPU."""

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import gevent
import psutil
import pynvml

SAMPLE_EVERY_S = 0.25


class ServerWatch:
    """A context manager; afterwards it tells what was used within it."""

    def __init__(self, pid: int | None, has_gpu: bool = True) -> None:
        """`pid` is the server's first process, None where it runs on another host; `has_gpu`: it computes on one."""
        self.cpu: float | None = None  # cores in use
        self.gpu: float | None = None  # share of the time
        self.memory: list[tuple[float, int]] = []  # seconds from the start, bytes resident
        self._root = None if pid is None else psutil.Process(pid)
        self._has_gpu = has_gpu
        self._gpu_shares: list[float] = []

    def __enter__(self) -> Self:
        """Begin."""
        self._began_s = time.monotonic()
        self._before = self._cpu_s()
        self._sampler = gevent.spawn(self._sample)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End."""
        self._sampler.kill()
        after, seconds = self._cpu_s(), time.monotonic() - self._began_s
        if after and seconds > 0:
            self.cpu = sum(used - self._before.get(process, 0.0) for process, used in after.items()) / seconds
        if self._gpu_shares:
            self.gpu = sum(self._gpu_shares) / len(self._gpu_shares)

    def _tree(self) -> list[psutil.Process]:
        if self._root is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def _cpu_s(self) -> dict[psutil.Process, float]:
        used = {}
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                used[process] = times.user + times.system
        return used

    def _resident(self) -> int:
        resident = 0
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                resident += process.memory_info().rss
        return resident

    def _sample(self) -> None:
        read_gpu = gpu_reader() if self._root is not None and self._has_gpu else None
        while True:
            if self._root is not None:
                self.memory.append((time.monotonic() - self._began_s, self._resident()))
            if read_gpu is not None:
                share = gevent.get_hub().threadpool.apply(read_gpu)
                if isinstance(share, float):
                    self._gpu_shares.append(share)
                else:
                    print(f"GPU use is not watched any longer in this run: {share}", file=sys.stderr)
                    self._gpu_shares, read_gpu = [], None
            gevent.sleep(SAMPLE_EVERY_S)


@functools.cache
def gpu_reader() -> Callable[[], float | pynvml.NVMLError] | None:
    """Return what reads the share of the time that the busiest GPU of this host is in use, by whatever process.

    It returns an error, which gevent's threads would print, where that cannot be read any longer.

    None where there is no NVIDIA GPU, and where none can be read. Which cannot is said on stderr, once a process: a GPU
    that is split by MIG tells no use.

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
