"""The workers that one API process is connected to."""

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from service.admission import Admission
from service.backends import Backends
from service.errors import DrainingError
from service.link import WorkerLink
from service.shared_state import SharedState

RECONNECT_INTERVAL_S = 0.05


class InFlight(NamedTuple):
    """Rows in flight, and how many of them count towards the queue's bound, where a large request counts as fewer."""

    rows: int
    counted: int


class WorkerPool:
    """Keeps a link to every worker, on the event loop of its API process."""

    def __init__(
        self,
        sockets: Iterable[Path],
        backends: Backends,
        state: SharedState,
        on_load: Callable[[], None],
        timeout_s: float,
        admission: Admission,
    ) -> None:
        """`backends` gets the workers' states; `on_load` is called at the start, and when requests have come or gone.

        A worker that holds requests and answers none for `timeout_s` is logged. `admission` says how much of a request
        counts in `in_flight`.
        """
        self._sockets = list(sockets)
        self._backends = backends
        self._state = state
        self._on_load = on_load
        self._timeout_s = timeout_s
        self._admission = admission
        self._links: list[WorkerLink | None] = [None] * len(self._sockets)
        self._up: list[WorkerLink] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._process: int | None = None

    def start(self, process: int) -> None:
        """Connect to every worker, now and whenever it comes back; `process` is this HTTP process's number."""
        self._process = process
        self._on_load()
        self._tasks = [asyncio.create_task(self._stay_connected(index)) for index in range(len(self._sockets))]

    async def close(self) -> None:
        """Close the connections, which tells the workers that no request will follow."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            if link:
                link.close()

    async def _stay_connected(self, index: int) -> None:
        path = self._sockets[index]
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(OSError):
                _, link = await loop.create_unix_connection(lambda: self.link(index), str(path))
                await link.lost
                self._links[index] = None
                self._refresh()
            await asyncio.sleep(RECONNECT_INTERVAL_S)

    def link(self, index: int) -> WorkerLink:
        """Return a new link to the worker number `index`; it serves from its first frame on."""
        name = self._sockets[index].stem
        link = WorkerLink(name, self._backends.names, self._refresh, self._on_load, self._timeout_s, self._admission)
        self._links[index] = link
        return link

    def give_up(self) -> None:
        """Answer, with an error, what is still in flight at the end of the time to drain."""
        for link in self._links:
            if link:
                link.fail_all(
                    DrainingError("the server had to stop before this request's result was there; send it again")
                )

    def least_loaded(self) -> WorkerLink:
        """Return the link that is up and has the fewest rows in flight.

        Raises:
            NotReadyError: no worker is up.
        """
        up = self._up
        if len(up) == 1:
            return up[0]
        if not up:
            raise self._backends.absence
        return min(up, key=lambda link: link.rows)

    @property
    def is_ready(self) -> bool:
        """Whether every worker is warm."""
        return len(self._up) == len(self._links)

    @property
    def in_flight(self) -> InFlight:
        """The rows that workers hold for this process, whether or not their callers still wait."""
        rows = counted = 0
        for link in self._links:
            if link:
                rows += link.rows
                counted += link.counted
        return InFlight(rows, counted)

    @property
    def unanswered(self) -> int:
        """Inference requests accepted by this process whose callers wait."""
        return sum(link.unanswered for link in self._links if link)

    @property
    def profiles(self) -> int:
        """Profiles asked of the workers by this process whose callers wait."""
        return sum(link.profiles for link in self._links if link)

    @property
    def shadows(self) -> int:
        """Shadows sent by this process and not yet answered by the workers."""
        return sum(link.shadows for link in self._links if link)

    def _refresh(self) -> None:
        self._up = [link for link in self._links if link and link.is_up]
        self._backends.report([link.backends for link in self._up])
        if self._process is not None:
            self._state.set_ready(self._process, self.is_ready)
