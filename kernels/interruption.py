"""Ctrl-C, raised as `KeyboardInterrupt` where it can be caught, however often it is pressed."""

import signal
import sys
import time
from types import FrameType

REPEAT_S = 2.0  # in which another one means the same: what began to end takes away what it made
AGAIN_S = 0.01  # until it is raised again where Python could not pass it on
IMPORTING = "<frozen importlib._bootstrap>"  # PyTorch's import makes other errors of what is raised in it

_last_s = -REPEAT_S  # by the monotonic clock; below 0: none yet


def handle() -> None:
    """Raise `KeyboardInterrupt` on SIGINT, of several in quick succession on the first one.

    Python raises it wherever it is. From a hook (``__del__``, the callback of a weak reference) it prints it and
    forgets it, so that it is raised again; in the midst of an import it waits for the end of that.
    """
    signal.signal(signal.SIGINT, _receive)
    signal.signal(signal.SIGALRM, _raise)
    sys.unraisablehook = _raise_again


def ignore() -> None:
    """Let the process end with the status that it has: Python's last steps would give SIGINT its effect back."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_cause(error: BaseException) -> bool:
    """Tell whether an error comes of Ctrl-C: libraries in C make other ones of `KeyboardInterrupt`."""
    return isinstance(error, KeyboardInterrupt) or _last_s > 0


def _receive(number: int, frame: FrameType | None) -> None:
    global _last_s
    now_s, before_s = time.monotonic(), _last_s
    _last_s = now_s
    if now_s - before_s >= REPEAT_S:
        _raise(number, frame)


def _raise(_number: int, frame: FrameType | None) -> None:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
            return
        frame = frame.f_back
    raise KeyboardInterrupt


def _raise_again(lost: "sys.UnraisableHookArgs") -> None:
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(lost)
