"""What an operator moves and computes, what the device can at most, measured in the same run, and the time between.

Times on a GPU are between two events on its stream. The host is given a head start, so that launching is not measured:
what runs from a CUDA graph, or behind other work, does not pay for it either.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

HEAD_START_CYCLES = 1_000_000  # of the GPU's clock, half a millisecond, while the host enqueues


class Work(NamedTuple):
    """Bytes that must cross memory, each operand read and each result written once, and FLOPs of the products."""

    bytes: int
    flops: int


class Roof(NamedTuple):
    """The most a device was seen to do: bytes a second of a copy, FLOPs a second of a large product by dtype."""

    bytes_per_s: float
    flops_per_s: dict[torch.dtype, float]

    def floor_s(self, work: Work, dtype: torch.dtype) -> float:
        """Return the least time `work` can take: the longer of moving its bytes and computing its products."""
        return max(work.bytes / self.bytes_per_s, work.flops / self.flops_per_s[dtype])


class Timing(NamedTuple):
    """Seconds a call: the median and the 20th and 80th percentile of the repetitions."""

    median_s: float
    low_s: float
    high_s: float
    repetitions: int


def timing(seconds: Sequence[float]) -> Timing:
    """Sum up repetitions.

    Raises:
        ValueError: there are none.
    """
    if not seconds:
        raise ValueError("timing: needs one repetition or more, got none")
    ordered = sorted(seconds)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    return Timing(statistics.median(ordered), low, high, len(ordered))


def interleaved(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    repetitions: int,
    before: Callable[[], object] | None = None,
    calls_each: int = 1,
) -> dict[str, Timing]:
    """Time `calls` in turn, so that a change of clock or load meets all of them alike.

    Args:
        calls: what to time, by name; each runs twice before, unmeasured.
        device: where they run.
        repetitions: of each.
        before: run before each repetition and not measured, say to flush the cache.
        calls_each: calls in one repetition, whose time is divided by it.

    Returns:
        One timing a name, per call.
    """
    for call in calls.values():
        call()
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    once = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    for _ in range(repetitions):
        for name, call in calls.items():
            if before is not None:
                before()
            seconds[name].append(once(call, calls_each) / calls_each)
    return {name: timing(each) for name, each in seconds.items()}


def _cpu_seconds(call: Callable[[], object], calls_each: int) -> float:
    start = time.perf_counter()
    for _ in range(calls_each):
        call()
    return time.perf_counter() - start


def _gpu_seconds(call: Callable[[], object], calls_each: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls_each):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def cache_flush(device: torch.device) -> Callable[[], object]:
    """Return what pushes everything else out of the device's caches: writing 256 MiB."""
    filler = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    return filler.zero_


def measured_roof(device: torch.device, dtypes: Sequence[torch.dtype], repetitions: int = 5) -> Roof:
    """Measure the roof: copy 256 MiB (1 GiB on a GPU), and multiply square matrices of 1024 (8192 on a GPU) a side.

    The best repetition counts, since a roof is what can be done at most.
    """
    is_gpu = device.type == "cuda"
    source = torch.zeros((1024 if is_gpu else 256) * 2**20, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    bytes_per_s = 2 * source.numel() / _best_s(partial(target.copy_, source), device, repetitions)
    side = 8192 if is_gpu else 1024
    flops_per_s = {}
    for dtype in dtypes:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        flops_per_s[dtype] = 2 * side**3 / _best_s(_product(a, b), device, repetitions)
    return Roof(bytes_per_s, flops_per_s)


def _product(a: Tensor, b: Tensor) -> Callable[[], object]:
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _best_s(call: Callable[[], object], device: torch.device, repetitions: int) -> float:
    call()
    once = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    return min(once(call, 1) for _ in range(repetitions))
