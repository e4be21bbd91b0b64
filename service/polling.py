"""Polls for work for a moment before going to sleep.

A caller's next request, and a worker's result, often arrive within some tens of microseconds; a sleeping process takes
as long again to wake, and a core that slept runs slower at first. `python -m loadtests overhead` shows what polling is
worth; MLP_SPIN_US=0 turns it off.

This applies to a caller that sends one request at a time. If many are under way, there is more work by the time this
one is done, and polling would take the core from whoever produces it: then a process sleeps at once.
"""

import asyncio
import os
import time

ALONE = 4  # how many requests in a row have to come one at a time


class Streak:
    """Counts how many requests in a row were alone when they came."""

    def __init__(self) -> None:
        self._length = 0

    def add(self, is_alone: bool) -> None:
        """Take note of one more."""
        self._length = self._length + 1 if is_alone else 0

    @property
    def is_long(self) -> bool:
        """Whether the next request will probably be alone, too."""
        return self._length >= ALONE


class Poller:
    """Keeps one event loop running for a while after each sign of work, yielding the core to whoever wants it."""

    def __init__(self, spin_us: int) -> None:
        self.streak = Streak()
        self._spin_ns = spin_us * 1000
        self._until_ns = 0
        self.is_turning = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def attend(self) -> None:
        """Work has come or gone: more may follow soon."""
        if not self._spin_ns or not self.streak.is_long:
            return
        self._until_ns = time.monotonic_ns() + self._spin_ns
        if not self.is_turning:
            self.is_turning = True
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if time.monotonic_ns() < self._until_ns and self._loop is not None:
            os.sched_yield()
            self._loop.call_soon(self._turn)
        else:
            self.is_turning = False
