"""LitServe's server, with patience for a worker that cannot start anew."""

import logging
import time
from multiprocessing.process import BaseProcess

import litserve as ls

from service.watch import ending
from service.worker_process import EngineAPI

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
log = logging.getLogger(__name__)


class Host(ls.LitServer):  # type: ignore[misc]
    """Starts an ended worker at once if it had been warm, else later and later."""

    def __init__(self, api: EngineAPI, **arguments: object) -> None:
        """Take what LitServe takes, with `api` as the only one."""
        super().__init__(api, **arguments)
        self._warmed: set[int] = set()
        self._failures: dict[int, int] = {}  # starts in a row that came to nothing, by worker
        self._due_s: dict[int, float] = {}

    def launch_single_inference_worker(self, lit_api: EngineAPI, worker_id: int) -> BaseProcess:
        """Return the worker started anew, or the ended one while it is not yet time: LitServe then asks again soon.

        One that has never been warm is not started again: `Watch` ends the server with its reason.
        """
        ended: BaseProcess = self.inference_workers[worker_id]
        path = lit_api.plan.socket(worker_id)
        if path.exists():  # it listened, so it was warm
            path.unlink()
            self._warmed.add(worker_id)
            self._failures.pop(worker_id, None)
        elif worker_id not in self._warmed:
            return ended
        elif worker_id not in self._due_s:
            failures = self._failures[worker_id] = self._failures.get(worker_id, 0) + 1
            wait_s = delay_s(failures)
            self._due_s[worker_id] = time.monotonic() + wait_s
            log.error(
                "worker %d ended while it started anew, with %s, %d in a row; it is started again in %g s",
                worker_id,
                ending(ended),
                failures,
                wait_s,
            )
        if time.monotonic() < self._due_s.get(worker_id, 0.0):
            return ended
        self._due_s.pop(worker_id, None)
        started: BaseProcess = super().launch_single_inference_worker(lit_api, worker_id)
        return started


def delay_s(failures: int) -> float:
    """Return how long to wait after so many starts in a row that came to nothing: doubled each time, to a bound."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 16))
