"""Looking for work for a moment before going to sleep.

A caller's next request, and a worker's result, are often there within some tens of microseconds; a process that slept
takes as long again to wake, and a core that slept runs slower at first. `python -m loadtests overhead` shows what it is
worth; MLP_SPIN_US=0 turns it off.
"""

import asyncio
import os
import time


class Poller:
    """Keeps one event loop turning for a while after each sign of work; yields the core to whoever else wants it."""

    def __init__(self, spin_us: int) -> None:
        self._spin_ns = spin_us * 1000
        self._until_ns = 0
        self._is_turning = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def attend(self) -> None:
        """Work has come or gone: more may follow soon."""
        if not self._spin_ns:
            return
        self._until_ns = time.monotonic_ns() + self._spin_ns
        if not self._is_turning:
            self._is_turning = True
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if time.monotonic_ns() < self._until_ns and self._loop is not None:
            os.sched_yield()
            self._loop.call_soon(self._turn)
        else:
            self._is_turning = False
