"""LitServe's server, which waits longer each time before it restarts a worker that keeps ending."""

import logging
import time
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess

import litserve as ls

from service import logs
from service.child_processes import ending
from service.worker_process import EngineAPI

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
STEADY_S = 10.0  # that a worker has to serve for its end to be none of a crash loop
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Backoff:
    """The restart backoff of one worker: how far it is into a crash loop.

    Attributes:
        failed_starts: since it was last warm.
        early_ends: ends within `STEADY_S` of being warm, since it last served for longer.
    """

    failed_starts: int = 0
    early_ends: int = 0

    def wait_s(self, served_s: float | None) -> float:
        """Count an end, and return how long the next start has to wait, in seconds.

        `served_s` is how long it had been warm, None where it never was. The first end of one that was warm waits for
        nothing: the next may well hold.
        """
        if served_s is None:
            self.failed_starts += 1
        else:
            self.failed_starts = 0
            self.early_ends = self.early_ends + 1 if served_s < STEADY_S else 1
        return delay_s(max(self.failed_starts, self.early_ends - 1))


class Host(ls.LitServer):  # type: ignore[misc]
    """Restarts an ended worker at once if it had served, and after growing waits if it ends early each time."""

    def __init__(self, api: EngineAPI, **arguments: object) -> None:
        """Take what LitServe takes, with `api` as the only one."""
        super().__init__(api, **arguments)
        self._backoffs: dict[int, Backoff] = {}  # of the workers that have been warm
        self._due_s: dict[int, float] = {}

    def launch_inference_worker(self, lit_api: EngineAPI) -> list[BaseProcess]:
        """Start the workers, after restoring the form of the log lines, which LitServe has just replaced."""
        logs.configure(lit_api.plan.log_format, is_request_logged=False)
        started: list[BaseProcess] = super().launch_inference_worker(lit_api)
        return started

    def launch_single_inference_worker(self, lit_api: EngineAPI, worker_id: int) -> BaseProcess:
        """Return the restarted worker, or the ended one if it is not yet time: LitServe then asks again soon.

        One that has never been warm is not started again: `Watch` ends the server with its reason.
        """
        ended: BaseProcess = self.inference_workers[worker_id]
        if worker_id not in self._due_s:
            path = lit_api.plan.socket(worker_id)
            served_s = None
            if path.exists():  # it listened, so it was warm
                served_s = time.time() - path.stat().st_mtime
                path.unlink()
                self._backoffs.setdefault(worker_id, Backoff())
            elif worker_id not in self._backoffs:
                return ended
            backoff = self._backoffs[worker_id]
            wait_s = backoff.wait_s(served_s)
            self._due_s[worker_id] = time.monotonic() + wait_s
            if wait_s:
                log.error(
                    "worker %d, pid %d, ended %s, with %s, %d in a row; it is started again in %g s",
                    worker_id,
                    ended.pid,
                    "while it started anew" if served_s is None else "soon after it was warm",
                    ending(ended),
                    backoff.failed_starts if served_s is None else backoff.early_ends,
                    wait_s,
                )
            else:
                log.error("worker %d, pid %d, ended with %s; it is started anew", worker_id, ended.pid, ending(ended))
        if time.monotonic() < self._due_s[worker_id]:
            return ended
        del self._due_s[worker_id]
        lit_api.plan = replace(lit_api.plan, is_restart=True)
        started: BaseProcess = super().launch_single_inference_worker(lit_api, worker_id)
        return started


def delay_s(failures: int) -> float:
    """Return how long to wait after so many failures in a row: nothing after none, then doubled, to a bound."""
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures - 1, 16)) if failures else 0.0
