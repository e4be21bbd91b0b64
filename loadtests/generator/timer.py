"""A timer that wakes a greenlet within tens of microseconds; the event loop's own rounds to whole milliseconds.

Source: https://man7.org/linux/man-pages/man2/timerfd_create.2.html.
"""

import ctypes
import os
import time
from typing import Self

import gevent

CLOCK_MONOTONIC = 1
TFD_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC
READABLE = 1  # libev's EV_READ
SHORTEST_S = 20e-6  # less than this is over by the time the timer is set

_libc = ctypes.CDLL(None, use_errno=True)


class _Setting(ctypes.Structure):
    """`struct itimerspec`: the interval between repeats, then the first expiry, each seconds and nanoseconds."""

    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


class Timer:
    """A context manager that holds the timer; for one greenlet at a time."""

    def __enter__(self) -> Self:
        """Make the timer.

        Raises:
            OSError: the system gives none.
        """
        self._file = _libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK_CLOEXEC)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create: the system gives no timer")
        self._watcher = gevent.get_hub().loop.io(self._file, READABLE)  # one for all waits: its making costs more
        return self

    def __exit__(self, *_: object) -> None:
        """Close the timer."""
        self._watcher.close()
        os.close(self._file)

    def sleep_until(self, moment_s: float) -> None:
        """Let other greenlets run until `time.perf_counter()` is `moment_s`; return at once where that is past.

        Raises:
            OSError: the timer could not be set.
        """
        left_s = moment_s - time.perf_counter()
        if left_s < SHORTEST_S:
            return
        whole, part = divmod(int(left_s * 1e9), 1_000_000_000)
        if _libc.timerfd_settime(self._file, 0, ctypes.byref(_Setting(0, 0, whole, part)), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime: the timer could not be set")
        gevent.get_hub().wait(self._watcher)
        os.read(self._file, 8)
