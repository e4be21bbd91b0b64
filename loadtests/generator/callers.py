"""The greenlets of an open loop: each sends a request, and once it is answered waits for the next.

A greenlet per request would be simpler, but the memory of its stack would be mapped and returned each time, which is a
tenth of what a request costs this process.
"""

from collections.abc import Callable

import gevent
from gevent.hub import Waiter
from gevent.pool import Group

Due = tuple[int, int, float]  # a kind of request, the number of its payload, and when it is due by perf_counter


class Callers:
    """A pool of as many greenlets as requests were ever in flight at once."""

    def __init__(self, send: Callable[[int, int, float], object], lose: Callable[[int, float], None]) -> None:
        """`send` takes what is due and returns when it is answered; `lose` takes what never was answered."""
        self.busy = 0
        self._send = send
        self._lose = lose
        self._free: list[Waiter[Due | None]] = []
        self._greenlets = Group()
        self._is_over = False

    def send(self, due: Due) -> None:
        """Have a request sent in the event loop's next turn."""
        self.busy += 1
        if self._free:
            self._wake(due)
        else:
            self._greenlets.add(gevent.spawn(self._call, due))

    def join(self, limit_s: float) -> None:
        """Wait for all replies, for at most that long."""
        self._is_over = True
        while self._free:
            self._wake(None)
        self._greenlets.join(limit_s)

    def kill(self) -> None:
        """End; requests that were sent and not answered count as lost."""
        self._greenlets.kill()

    def _wake(self, due: Due | None) -> None:
        gevent.get_hub().loop.run_callback(self._free.pop().switch, due)

    def _call(self, due: Due | None) -> None:
        while due is not None:
            kind, payload, due_s = due
            try:
                self._send(kind, payload, due_s)
            except gevent.GreenletExit:
                self._lose(kind, due_s)
                return
            finally:
                self.busy -= 1
            if self._is_over:
                return
            waiter: Waiter[Due | None] = Waiter()
            self._free.append(waiter)
            due = waiter.get()
