"""What ends a measurement before its time, Ctrl-C or SIGTERM, raised where it can be caught."""

import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def handle() -> None:
    """Raise `KeyboardInterrupt` on SIGINT and SIGTERM, in the main greenlet where the process runs greenlets.

    Python calls a handler in whichever greenlet runs. Raised in a user's, `KeyboardInterrupt` would reach the main one
    as well, but gevent prints the user's traceback first.
    """
    for number in SIGNALS:
        signal.signal(number, _raise)


def _raise(_number: int, _frame: FrameType | None) -> None:
    gevent = sys.modules.get("gevent")  # the commands that send by greenlets have imported it
    if gevent is None:
        raise KeyboardInterrupt
    hub = gevent.get_hub()
    if gevent.getcurrent() is hub.parent:
        raise KeyboardInterrupt
    hub.loop.run_callback_threadsafe(hub.parent.throw, KeyboardInterrupt)
