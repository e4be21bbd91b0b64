"""What ends a measurement before its time (Ctrl-C, SIGTERM, the end of its terminal), raised where it can be caught."""

import signal
import sys
import time
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 2.0  # in which another signal means the same: what began to end writes what it has

_last_s = -REPEAT_S


def handle() -> None:
    """Raise `KeyboardInterrupt` on these signals, in the main greenlet where the process runs greenlets.

    Of several in quick succession the first one does. SIGHUP stays ignored where it is, as under `nohup`.

    Python calls a handler in whichever greenlet runs. Raised in a user's, `KeyboardInterrupt` would reach the main one
    as well, but gevent prints the user's traceback first.
    """
    for number in SIGNALS:
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        signal.signal(number, _raise)


def _raise(_number: int, _frame: FrameType | None) -> None:
    global _last_s
    now_s, before_s = time.monotonic(), _last_s
    _last_s = now_s
    if now_s - before_s < REPEAT_S:
        return
    gevent: Any = sys.modules.get("gevent")  # the commands that send by greenlets have imported it
    if not hasattr(gevent, "get_hub"):  # not imported, or not yet whole
        raise KeyboardInterrupt
    hub = gevent.get_hub()
    if gevent.getcurrent() is hub.parent:
        raise KeyboardInterrupt
    hub.loop.run_callback_threadsafe(hub.parent.throw, KeyboardInterrupt)
