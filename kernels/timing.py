"""Times calls against each other, and summarises the repetitions.

Times on a GPU are between two events on its stream. The host is given a head start, so that launching is not measured:
kernels replayed from a CUDA graph, or queued behind other work, do not pay for it either.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

HEAD_START_CYCLES = 1_000_000  # of the GPU's clock, half a millisecond, while the host enqueues


class Timing(NamedTuple):
    """Seconds per call: the median and the 20th and 80th percentile of the repetitions."""

    median_s: float
    low_s: float
    high_s: float
    repetitions: int


def summary(seconds: Sequence[float]) -> Timing:
    """Summarise repetitions.

    Raises:
        ValueError: there are none.
    """
    if not seconds:
        raise ValueError("summary: needs one repetition or more, got none")
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
    """Time each of `calls` once per repetition, which starts with another one than the repetition before.

    A change of clock or load thus affects all of them alike.

    Args:
        calls: what to time, by name; each runs twice before, unmeasured.
        device: where they run.
        repetitions: of each.
        before: run before each repetition and not measured, say to flush the cache.
        calls_each: calls in one repetition, whose time is divided by it.

    Returns:
        A timing per call for each name.
    """
    for call in calls.values():
        call()
        call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for done in range(repetitions):
        start = done % len(names)
        for name in names[start:] + names[:start]:
            if before is not None:
                before()
            seconds[name].append(seconds_of(calls[name], device, calls_each) / calls_each)
    return {name: summary(each) for name, each in seconds.items()}


def seconds_of(call: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Time `call`, run so many times in a row: the seconds of all together."""
    return (_gpu_seconds if device.type == "cuda" else _cpu_seconds)(call, times)


def _cpu_seconds(call: Callable[[], object], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def _gpu_seconds(call: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def cache_flush(device: torch.device) -> Callable[[], object]:
    """Return what pushes everything else out of the device's caches: writing 256 MiB."""
    filler = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    return filler.zero_
