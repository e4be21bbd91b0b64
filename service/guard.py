"""Checks every backend against eager while it serves, and takes out one that is wrong or fails.

A share of the requests that another backend answers is run on eager as well, after the reply, while a worker has
nothing else to do; how far apart the results are goes to the metrics. A backend is taken out, in every HTTP process at
once, if

    drift        a result is further from eager's than the bound, and the dtype resolves the inputs
    non_finite   it holds NaN or infinity where eager's does not
    fault        its run raises

and stays out until somebody puts it back (`Backends.put_back`). Requests that name no backend go on to the next one,
including those in the failing batch, those that were waiting for it and those being computed; requests that name it get
the error.
"""

import logging
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.errors import BackendUnavailableError
from service.backends import MAX_REASON, REFERENCE
from service.dispatch import Dispatcher, Ticket
from service.errors import NonFiniteOutputError, RemoteError, code_of, without_paths
from service.link import Result
from service.metrics import Metrics
from service.schemas import InferenceRequest, Rows

MAX_DRIFT = {"float32": 0.001, "float16": 0.01, "bfloat16": 0.05}
"""What the bound is where none is set: beyond what rounding leaves between two right backends (README, batches)."""
FLOOR = {"float32": 2.0**-103, "float16": 2.0**-14, "bfloat16": 2.0**-119}
"""Below it, a row's largest number has less than its dtype's relative precision, and right backends may be far apart.

It is the absolute error that is left there, over the dtype's eps. In float32 and bfloat16 that is the smallest normal
number, 2**-126: oneDNN's bfloat16 products flush what is smaller to zero, operands and a residual alike, where eager's
addition does not. float16's subnormals are kept, in steps of 2**-24.
"""
log = logging.getLogger(__name__)


class Difference(NamedTuple):
    """The largest difference of any number, and the largest relative to the reference's largest number of its row."""

    absolute: float
    relative: float


def difference(rows: Rows, reference: Rows, floor: float = FLOOR["float32"]) -> Difference:
    """Measure how far finite rows are from finite reference rows, as models/batch_invariance.py does.

    For a row whose largest number is below `floor`, the dtype's `FLOOR`, differences are relative to that.
    """
    apart = np.abs(rows.astype(np.float64) - reference)
    largest = np.maximum(np.abs(reference.astype(np.float64)).max(axis=1), floor)
    return Difference(float(apart.max()), float((apart.max(axis=1) / largest).max()))


def is_resolved(rows: Rows, floor: float) -> NDArray[np.bool_]:
    """Tell for each input row whether its dtype holds it to its full precision, as it does zeros.

    If not, a difference is no fault of a backend, however large a norm after the residual add makes it.
    """
    largest = np.abs(rows).max(axis=1)
    is_lost: NDArray[np.bool_] = (largest > 0) & (largest < floor)
    return ~is_lost


class Guard:
    """Judges the backends in one HTTP process; what it finds applies in all of them."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: Metrics,
        shadow_rate: float = 0.0,
        max_drift: float = MAX_DRIFT["float32"],
        floor: float = FLOOR["float32"],
    ) -> None:
        """`shadow_rate` is the share of requests that are run on eager too, `max_drift` the bound, as `Difference`.

        `floor` is the `FLOOR` of the dtype that is served.
        """
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._shadow_rate = shadow_rate
        self._max_drift = max_drift
        self.floor = floor

    @property
    def is_shadowing(self) -> bool:
        """Whether answers are to be passed to `answered`."""
        return self._shadow_rate > 0

    def answered(self, request: InferenceRequest, result: Result) -> None:
        """Run a share of what another backend has answered on eager as well."""
        if result.backend != REFERENCE and random.random() < self._shadow_rate:  # noqa: S311
            self._shadow(request, result)

    def failed(self, backend: str, error: BaseException) -> None:
        """Take out a backend whose run has raised; other errors say nothing about it."""
        if isinstance(error, RemoteError) and code_of(error) == "internal":
            words = without_paths(str(error))[:MAX_REASON]
            self._dispatcher.backends.take_out(backend, "fault", f"a run of it failed with {words}")

    def retry(
        self,
        request: InferenceRequest,
        backend: str | None,
        outcome: Result | Exception,
        error: Exception,
        accepted_ns: int,
        deliver: Callable[[str, Result | Exception], None],
        ticket: Ticket,
    ) -> bool:
        """Judge the backend by a failure, and run the request on another one if its caller named none.

        Args:
            request: the caller's.
            backend: what it was run on.
            outcome: what came back.
            error: why that cannot be the reply.
            accepted_ns: when the request was accepted.
            deliver: takes the other backend and its outcome.
            ticket: the request's, which moves there.

        Returns:
            Whether it is run on another one; else the error stands.

        Raises:
            NotReadyError: there is no worker to run it.
        """
        if backend is None or backend == REFERENCE:
            return False
        if isinstance(outcome, Result):
            if isinstance(error, BackendUnavailableError):  # taken out while this waited, or was computed
                return self._follow(request, backend, accepted_ns, deliver, ticket)
            if not isinstance(error, NonFiniteOutputError) or not self.is_shadowing:
                return False
            if request.backend is not None:
                self._shadow(request, outcome)
                return False
            if self._dispatcher.backends.states[REFERENCE].state != "ready":
                return False

            times_put_back = self._dispatcher.backends.times_put_back(outcome.backend)

            def judge(later: Result | Exception) -> None:
                self._judge(request.rows, outcome, times_put_back, later)
                deliver(REFERENCE, later)

            # Which tells as well whether the backend or the rows are at fault.
            self._dispatcher.resubmit(request, REFERENCE, accepted_ns, judge, ticket)
            return True
        self.failed(backend, error)
        return code_of(error) == "internal" and self._follow(request, backend, accepted_ns, deliver, ticket)

    def _follow(
        self,
        request: InferenceRequest,
        backend: str,
        accepted_ns: int,
        deliver: Callable[[str, Result | Exception], None],
        ticket: Ticket,
    ) -> bool:
        """Run a request on the default backend, if its caller named none and the default has changed."""
        following = self._dispatcher.backends.default()
        if request.backend is not None or following in (None, backend):
            return False
        self._dispatcher.resubmit(request, following, accepted_ns, partial(deliver, following), ticket)
        return True

    def _shadow(self, request: InferenceRequest, result: Result) -> None:
        times_put_back = self._dispatcher.backends.times_put_back(result.backend)
        self._dispatcher.shadow(
            request.rows, lambda outcome: self._judge(request.rows, result, times_put_back, outcome)
        )

    def _judge(self, inputs: Rows, result: Result, times_put_back: int, reference: Result | Exception) -> None:
        """Compare a result with eager's of the same inputs.

        `times_put_back` is how often its backend had been put back: if that has changed, the result no longer counts.
        """
        if times_put_back != self._dispatcher.backends.times_put_back(result.backend):
            return
        if isinstance(reference, Exception):
            log.info("a request could not be run on %s as well: %s", REFERENCE, reference)
            return
        is_comparable = np.isfinite(reference.rows)
        if (is_comparable & ~np.isfinite(result.rows)).any():
            reason = f"its result held NaN or infinity where {REFERENCE}'s did not"
            self._dispatcher.backends.take_out(result.backend, "non_finite", reason)
            return
        rows = is_comparable.all(axis=1) & np.isfinite(result.rows).all(axis=1) & is_resolved(inputs, self.floor)
        if not rows.any():
            return
        drift = difference(result.rows[rows], reference.rows[rows], self.floor).relative
        self._metrics.drifted(result.backend, drift)
        if drift > self._max_drift:
            reason = (
                f"its result was {drift:.3g} of the row's largest output away from {REFERENCE}'s, more than max-drift, "
                f"{self._max_drift:g}"
            )
            self._dispatcher.backends.take_out(result.backend, "drift", reason)
