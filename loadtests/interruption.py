"""What ends a measurement before its time (Ctrl-C, SIGTERM, the end of its terminal), raised where it can be caught."""

import logging
import signal
import sys
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 2.0  # in which another signal means the same: what began to end writes what it has
AGAIN_S = 0.01  # until it is raised again where Python could not pass it on
CRITICAL_SECTIONS = ("<frozen importlib._bootstrap>", logging.__file__)  # code that would leave a lock held

_last_s = -REPEAT_S


def handle() -> None:
    """Raise `KeyboardInterrupt` on these signals, in the main greenlet where the process runs greenlets.

    Of several in quick succession the first one does. SIGHUP stays ignored where it is, as under `nohup`.

    Python calls a handler in whichever greenlet runs. Raised in a user's, `KeyboardInterrupt` would reach the main one
    as well, but gevent prints the user's traceback first. And Python calls it wherever it is. What is raised in a hook
    (`os.register_at_fork`, `__del__`, the callback of a weak reference) it prints and forgets, so that it is raised
    again. In the midst of an import, or of what logging does, a lock would stay held: it waits for the end of that.
    """
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, _receive)
    signal.signal(signal.SIGALRM, _raise)
    sys.unraisablehook = _raise_again


def ignore() -> None:
    """Let the process end with the status that it has: Python's last steps would give signals their effect back."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _receive(number: int, frame: FrameType | None) -> None:
    global _last_s
    now_s, before_s = time.monotonic(), _last_s
    _last_s = now_s
    if now_s - before_s >= REPEAT_S:
        _raise(number, frame)


def _raise(_number: int, frame: FrameType | None) -> None:
    if _is_in_critical_section(frame):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        return
    gevent: Any = sys.modules.get("gevent")  # the commands that send by greenlets have imported it
    if not hasattr(gevent, "get_hub"):  # not imported, or not yet whole
        raise KeyboardInterrupt
    hub = gevent.get_hub()
    if gevent.getcurrent() is hub.parent:
        raise KeyboardInterrupt
    hub.loop.run_callback_threadsafe(hub.parent.throw, KeyboardInterrupt)


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
