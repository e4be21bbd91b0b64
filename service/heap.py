"""A process's heap while it serves: what garbage collection leaves out, and how much freed memory is kept."""

import ctypes
import gc
import os
import time
from pathlib import Path

M_TRIM_THRESHOLD = -1  # of malloc.h
M_MMAP_MAX = -4
KEPT_BYTES = 256 << 20  # more than a batch takes of most models; what a profile took on top of it goes back
LOOK_NS = 100_000_000  # between two looks at how much memory is held
STATM = Path("/proc/self/statm")


def freeze_heap() -> None:
    """Collect once, then leave everything that exists out of later collections.

    FastAPI, pydantic and torch make some hundred thousand permanent objects; each full collection would walk them all
    while requests wait. Source: https://docs.python.org/3/library/gc.html#gc.freeze.
    """
    gc.collect()
    gc.freeze()


class FreedMemory:
    """Gives free memory back now, and from then on keeps freed memory for the next batch, up to a bound.

    glibc returns a batch's tensors to the kernel when they are freed, and the next batch's first write to each page
    waits for the kernel to clear it, which at saturation costs throughput.

    Batches of other sizes do not fit the holes that earlier ones have left, and keeping those holes would take ever
    more memory. So free memory is given back whenever the process holds `kept_bytes` more than after the last time.

    Raises:
        OSError: the C library refuses, which glibc does not.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html and malloc_trim.3.html beside it.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._library = ctypes.CDLL(None)
        self._kept_bytes = kept_bytes
        self._most_bytes = self._next_look_ns = 0
        self.give_back()
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, kept_bytes)):
            if not self._library.mallopt(option, value):
                raise OSError(f"mallopt({option}, {value}): expected glibc to take it, got a refusal")

    def bound(self) -> None:
        """Give free memory back if it has become too much; checks at most once per `LOOK_NS`."""
        if time.monotonic_ns() >= self._next_look_ns:
            self._next_look_ns = time.monotonic_ns() + LOOK_NS
            if resident_bytes() > self._most_bytes:
                self.give_back()

    def give_back(self) -> None:
        """Give all pages that are entirely free back to the kernel."""
        self._library.malloc_trim(0)
        self._most_bytes = resident_bytes() + self._kept_bytes
        self._next_look_ns = time.monotonic_ns() + LOOK_NS


def resident_bytes() -> int:
    """Return how much memory this process holds."""
    return int(STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
