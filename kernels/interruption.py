"""Ctrl-C, raised as `KeyboardInterrupt` where it can be caught, however often it is pressed."""

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

REPEAT_S = 2.0  # in which another one means the same: what began to end takes away what it made
AGAIN_S = 0.01  # until it is raised again where Python could not pass it on
IMPORTING = "<frozen importlib._bootstrap>"  # PyTorch's import makes other errors of what is raised in it

T = TypeVar("T")

_last_s = -REPEAT_S  # by the monotonic clock; below 0: none yet
_is_due = _is_interruptible = False


def handle() -> None:
    """Raise `KeyboardInterrupt` on SIGINT within `interruptible`, only once for several in quick succession.

    Python may raise it at any point. Raised in a hook (``__del__``, the callback of a weak reference) it is printed and
    forgotten, so it is raised again; in the middle of an import it waits for the end of that.
    """
    signal.signal(signal.SIGINT, _receive)
    signal.signal(signal.SIGALRM, _raise)
    sys.unraisablehook = _raise_again


def interruptible(work: Callable[[], T]) -> T:
    """Do the work that Ctrl-C may end, and return its result.

    What then says how it ended is not ended itself, however late another Ctrl-C comes; one from before the work counts.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    global _is_interruptible
    _is_interruptible = True
    try:
        if _is_due:
            raise KeyboardInterrupt
        return work()
    finally:
        _is_interruptible = False


def ignore() -> None:
    """Let the process exit with its own status: at its end Python would restore the signals' default effects."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)


def is_cause(error: BaseException) -> bool:
    """Tell whether Ctrl-C caused an error: libraries in C turn `KeyboardInterrupt` into other errors."""
    return isinstance(error, KeyboardInterrupt) or _last_s > 0


def _receive(number: int, frame: FrameType | None) -> None:
    global _last_s
    now_s, before_s = time.monotonic(), _last_s
    _last_s = now_s
    if now_s - before_s >= REPEAT_S:
        _raise(number, frame)


def _raise(_number: int, frame: FrameType | None) -> None:
    global _is_due
    _is_due = True
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        frame = frame.f_back
    if _is_interruptible:
        raise KeyboardInterrupt


def _raise_again(lost: "sys.UnraisableHookArgs") -> None:
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(lost)
