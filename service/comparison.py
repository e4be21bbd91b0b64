"""`POST /compare`: the same rows through every backend, one after the other, and how far each is from eager.

Each run is an ordinary request to its backend: admitted, batched and counted as one. They come one after the other, so
that none waits for another and the times can be compared. The result of a backend that was taken out before the end of
the last run is not given, since it may be wrong: the backend is shown as unavailable, with the reason.
"""

import logging
import time
from dataclasses import replace
from typing import Any, NamedTuple

from starlette.requests import ClientDisconnect, Request

from models.errors import BackendUnavailableError, MLPError
from service import schemas
from service.backends import REFERENCE
from service.body import json_body
from service.dispatch import Dispatcher
from service.errors import (
    STATUS,
    DeadlineExceededError,
    DrainingError,
    NotReadyError,
    OverloadedError,
    code_of,
    message_of,
)
from service.guard import Guard, difference
from service.inference import InferenceOptions
from service.link import Result
from service.logs import is_request_logged, log_request
from service.metrics import Metrics
from service.outcome import Gone, departure, outcome_of
from service.reply import Content, json_content
from service.response import SCOPE_REQUEST_ID
from service.schemas import InferenceRequest

log = logging.getLogger(__name__)


class Run(NamedTuple):
    """What became of one backend's run."""

    outcome: Result | Exception
    total_ns: int


class Comparison:
    """Runs comparisons in one HTTP process."""

    def __init__(self, dispatcher: Dispatcher, options: InferenceOptions, metrics: Metrics, guard: Guard) -> None:
        self._dispatcher = dispatcher
        self._guard = guard
        self._options = options
        self._metrics = metrics

    async def answer(self, request: Request) -> Content:
        """Read a body, run it and write the reply. A run that fails is an entry of the reply and does not fail it.

        Raises:
            BadRequestError, TooLargeError, UnsupportedMediaTypeError: the body is not one that is taken.
            DrainingError, NotReadyError, OverloadedError: the first run, not counting unavailable backends, is not
                admitted.
            ClientDisconnect: the caller has gone.
        """
        try:
            asked, names = await self._read(request)
        except MLPError as error:
            self._metrics.refused(None, code_of(error))
            raise
        request_id = request.scope[SCOPE_REQUEST_ID].decode("latin-1")
        async with departure(request) as gone:
            runs = await self._run_all(asked, names, request_id, gone)
        return json_content(self._document(asked, names, runs))

    async def _read(self, request: Request) -> tuple[InferenceRequest, tuple[str, ...]]:
        body = await json_body(request, self._options.max_body_bytes)
        states = self._dispatcher.backends.states
        asked, names = schemas.parse_compare(body, self._options.width_in, self._options.max_request_rows)
        self._dispatcher.backends.require_known(names or (), "backends")
        ready = tuple(name for name, state in states.items() if state.state == "ready")
        return asked, names or ready or self._dispatcher.backends.names

    async def _run_all(
        self, asked: InferenceRequest, names: tuple[str, ...], request_id: str, gone: Gone
    ) -> dict[str, Run]:
        """Run the reference first, where it is ready, then the others in order, and count what became of each."""
        states = self._dispatcher.backends.states
        wanted = (
            [REFERENCE] if REFERENCE in names or (REFERENCE in states and states[REFERENCE].state == "ready") else []
        )
        wanted += [name for name in names if name != REFERENCE]
        timeout_s = self._dispatcher.timeout_s if asked.timeout_s is None else asked.timeout_s
        end_s = time.monotonic() + min(timeout_s, self._dispatcher.timeout_s)
        runs: dict[str, Run] = {}
        is_admitted = False
        try:
            for name in wanted:
                runs[name] = run = await self._run(name, replace(asked, timeout_s=end_s - time.monotonic()), gone)
                if not is_admitted and isinstance(run.outcome, DrainingError | NotReadyError | OverloadedError):
                    raise run.outcome
                is_admitted |= not isinstance(run.outcome, BackendUnavailableError)
        finally:
            runs = {name: self._kept(run) for name, run in runs.items()}
            for name, run in runs.items():
                self._count(name, run, request_id)
        return runs

    def _kept(self, run: Run) -> Run:
        """Replace the results of backends that have been taken out since by the error that says so."""
        if isinstance(run.outcome, Result):
            try:
                self._dispatcher.backends.require_kept(run.outcome.backend)
            except MLPError as error:
                return run._replace(outcome=error)
        return run

    async def _run(self, name: str, request: InferenceRequest, gone: Gone) -> Run:
        start_ns = time.monotonic_ns()
        outcome: Result | Exception
        try:
            if request.timeout_s is not None and request.timeout_s <= 0:
                raise DeadlineExceededError("the deadline passed before this backend's turn; ask for a longer timeout")
            result: Result = await outcome_of(
                lambda deliver: self._dispatcher.submit(request, name, start_ns, deliver), gone
            )
            schemas.require_finite(result.rows)
            outcome = result
        except ClientDisconnect:
            raise
        except Exception as error:
            self._guard.failed(name, error)
            outcome = error
        return Run(outcome, time.monotonic_ns() - start_ns)

    def _count(self, name: str, run: Run, request_id: str) -> None:
        outcome = run.outcome
        if isinstance(outcome, Exception):
            code = code_of(outcome)
            self._metrics.refused(name, code)
            if code == "internal":
                log.error("request %s failed", request_id, exc_info=outcome, extra={"request_id": request_id})
            if is_request_logged():
                total_us = run.total_ns // 1000
                log_request(request_id=request_id, status=STATUS[code], code=code, backend=name, total_us=total_us)
            return
        seconds = run.total_ns / 1e9
        self._metrics.answered(name, seconds, outcome.queue_ns / 1e9, outcome.compute_ns / 1e9, outcome.batch_rows)
        if is_request_logged():
            log_request(
                request_id=request_id,
                status=200,
                backend=name,
                rows=len(outcome.rows),
                queue_us=outcome.queue_ns // 1000,
                batch_us=outcome.batch_ns // 1000,
                compute_us=outcome.compute_ns // 1000,
                total_us=run.total_ns // 1000,
                batch_rows=outcome.batch_rows,
            )

    def _document(self, asked: InferenceRequest, names: tuple[str, ...], runs: dict[str, Run]) -> dict[str, Any]:
        reference = runs.get(REFERENCE)
        entries = {
            name: self._entry(asked, runs[name], reference) for name in self._dispatcher.backends.names if name in names
        }
        name = {} if asked.id is None else {"id": asked.id}
        return {"rows": len(asked.rows), "reference": REFERENCE, "backends": entries, **name}

    def _entry(self, asked: InferenceRequest, run: Run, reference: Run | None) -> dict[str, Any]:
        outcome = run.outcome
        if isinstance(outcome, Exception):
            return {"error": message_of(outcome), "code": code_of(outcome)}
        entry: dict[str, Any] = {
            "implementation": outcome.implementation,
            "queue_ms": outcome.queue_ns / 1e6,
            "compute_ms": outcome.compute_ns / 1e6,
            "total_ms": run.total_ns / 1e6,
            "batch_rows": outcome.batch_rows,
            "max_abs_diff": None,
            "max_rel_diff": None,
        }
        if reference is None:
            entry["reason"] = f"{REFERENCE} is not ready on this server, so there is nothing to compare with"
        elif isinstance(reference.outcome, Exception):
            entry["reason"] = f"{REFERENCE} gave no result to compare with: {message_of(reference.outcome)}"
        else:
            found = difference(outcome.rows, reference.outcome.rows, self._guard.floor)
            entry |= {"max_abs_diff": found.absolute, "max_rel_diff": found.relative}
        entry["outputs"] = outcome.rows.reshape(*asked.shape, outcome.rows.shape[1])
        if self._options.labels:
            entry["labels"] = schemas.labels_of(outcome.rows, self._options.labels, asked.shape)
        return entry
