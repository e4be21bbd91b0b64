"""A process's heap while it serves: what is left out of garbage collection, and what it keeps of what is freed."""

import ctypes
import gc

M_TRIM_THRESHOLD = -1  # of malloc.h
M_MMAP_MAX = -4
KEPT_BYTES = 1 << 30  # more than a batch takes; what a profile of a large model took on top of it goes back


def freeze_heap() -> None:
    """Collect once, then leave everything that is there out of later collections.

    FastAPI, pydantic and torch leave some hundred thousand objects for good; each full collection would walk them all
    while requests wait. Source: https://docs.python.org/3/library/gc.html#gc.freeze.
    """
    gc.collect()
    gc.freeze()


def keep_freed_memory() -> None:
    """Give back what is free now, and keep from now on what is freed, for the next batch.

    glibc hands a batch's tensors back to the kernel when they are freed, and the next batch's first write to each page
    of them waits for the kernel to clear it: 130 MB a second of them at saturation, which costs two or three rows
    in a hundred.

    Raises:
        OSError: the C library refuses, which glibc does not.

    Source: https://man7.org/linux/man-pages/man3/mallopt.3.html.
    """
    library = ctypes.CDLL(None)
    library.malloc_trim(0)
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, KEPT_BYTES)):
        if not library.mallopt(option, value):
            raise OSError(f"mallopt({option}, {value}): expected glibc to take it, got a refusal")
