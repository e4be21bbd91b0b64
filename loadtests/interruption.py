"""Raises what ends a measurement early (Ctrl-C, SIGTERM, the end of its terminal) where it can be caught."""

import logging
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 2.0  # in which another signal means the same: what began to end writes what it has
AGAIN_S = 0.01  # until it is raised again where Python could not pass it on
CRITICAL_SECTIONS = ("<frozen importlib._bootstrap>", logging.__file__)  # code that would leave a lock held

T = TypeVar("T")

_last_s = -REPEAT_S
_is_due = _is_interruptible = False


def handle() -> None:
    """Raise `KeyboardInterrupt` on these signals within `interruptible`, in the main greenlet if there are greenlets.

    Of several signals in quick succession only the first counts. SIGHUP stays ignored if it was, as under `nohup`.

    Python calls a handler in whichever greenlet runs. Raised in a user's, `KeyboardInterrupt` would reach the main one
    as well, but gevent would print the user's traceback first. Python also calls it at any point of the code. What is
    raised in a hook (`os.register_at_fork`, `__del__`, the callback of a weak reference) is printed and forgotten, so
    it is raised again. In the middle of an import or of logging a lock would stay held, so the handler waits.
    """
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, _receive)
    signal.signal(signal.SIGALRM, _raise)
    sys.unraisablehook = _raise_again


def interruptible(work: Callable[[], T]) -> T:
    """Do the work that a signal may end, and return its result.

    What then says how it ended is not ended itself, however late another signal comes; one from before the work counts.

    Raises:
        KeyboardInterrupt: one of the signals came.
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
    for number in (*SIGNALS, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)


def _receive(number: int, frame: FrameType | None) -> None:
    global _last_s
    now_s, before_s = time.monotonic(), _last_s
    _last_s = now_s
    if now_s - before_s >= REPEAT_S:
        _raise(number, frame)


def _raise(_number: int, frame: FrameType | None) -> None:
    global _is_due
    _is_due = True
    if _is_in_critical_section(frame):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        return
    if not _is_interruptible:
        return
    gevent: Any = sys.modules.get("gevent")  # the commands that send by greenlets have imported it
    if not hasattr(gevent, "get_hub"):  # not imported, or not yet whole
        raise KeyboardInterrupt
    hub = gevent.get_hub()
    if gevent.getcurrent() is hub.parent:
        raise KeyboardInterrupt
    hub.loop.run_callback_threadsafe(_throw, hub.parent)


def _throw(main: Any) -> None:
    if _is_interruptible:
        main.throw(KeyboardInterrupt)


def _is_in_critical_section(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in CRITICAL_SECTIONS:
            return True
        frame = frame.f_back
    return False


def _raise_again(lost: "sys.UnraisableHookArgs") -> None:
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    else:
        sys.__unraisablehook__(lost)
