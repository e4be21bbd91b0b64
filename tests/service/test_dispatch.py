"""Admission and the way to a worker, with a worker at the other end of a byte string."""

import asyncio
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from models.errors import BackendUnavailableError, UnknownBackendError
from service.dispatch import MAX_SHADOWS, Ticket
from service.errors import DeadlineExceededError, DrainingError, NotReadyError, OverloadedError, WorkerLostError
from service.link import Result
from service.schemas import InferenceRequest
from service.wire import Kind
from tests.service.far_worker import MAX_QUEUE_ROWS, FarWorker, array, looped

ROWS = array([1.0, 2.0])


def submit(far: FarWorker, rows: int = 1, backend: str | None = "fused") -> list[Result | Exception]:
    """Submit a request, and return the list that its outcome will be in."""
    outcomes: list[Result | Exception] = []
    request = InferenceRequest(np.repeat(ROWS, rows, axis=0), ())
    far.dispatcher.submit(request, backend, time.monotonic_ns(), outcomes.append)
    return outcomes


@looped
async def test_a_request_is_sent_and_its_result_delivered() -> None:
    far = FarWorker()
    outcomes = submit(far)
    (frame,) = await far.sent()
    assert (frame.kind, frame.rows, far.dispatcher.pool.in_flight.rows) == (Kind.INFER, 1, 1)
    far.answer(frame, ROWS)
    (outcome,) = outcomes
    assert isinstance(outcome, Result)
    assert (outcome.backend, outcome.rows.tolist(), far.dispatcher.pool.in_flight.rows) == ("fused", [[1.0, 2.0]], 0)


@looped
async def test_what_cannot_be_served_is_not_admitted() -> None:
    far = FarWorker()
    far.dispatcher.backends.take_out("fused", "drift", "wrong")
    submit(far, MAX_QUEUE_ROWS, "eager")
    for backend, error in (
        (None, NotReadyError),
        ("nope", UnknownBackendError),
        ("fused", BackendUnavailableError),
        ("eager", OverloadedError),
    ):
        with pytest.raises(error):
            submit(far, backend=backend)
    far.state.start_draining()
    with pytest.raises(DrainingError):
        submit(far, backend="eager")
    assert len(await far.sent()) == 1


@looped
async def test_a_large_request_counts_as_one_batch_towards_the_bound() -> None:
    far = FarWorker(counted_rows=MAX_QUEUE_ROWS // 2)
    rows = MAX_QUEUE_ROWS // 2 + 5
    first, _ = submit(far, rows), submit(far, rows)
    for beyond in (1, rows):
        with pytest.raises(OverloadedError, match=f"it holds {MAX_QUEUE_ROWS} of {MAX_QUEUE_ROWS} rows"):
            submit(far, beyond)
    sent = await far.sent()
    assert (len(sent), far.metric("mlp_queue_rows")) == (2, 2 * rows)
    assert far.metric("mlp_queue_counted_rows") == far.metric("mlp_queue_limit_rows") == MAX_QUEUE_ROWS
    assert not far.dispatcher.shadow(ROWS, lambda _: None)
    far.answer(sent[0], np.zeros((rows, 2), dtype=np.float32))
    assert [type(outcome) for outcome in first] == [Result]
    assert far.dispatcher.shadow(ROWS, lambda _: None)  # half of the bound counts, whatever the rows are
    submit(far, MAX_QUEUE_ROWS // 2)
    with pytest.raises(OverloadedError):
        submit(far)
    far.link.connection_lost(None)
    assert far.dispatcher.pool.in_flight.counted == 0


@looped
async def test_the_bound_follows_what_results_took_and_not_what_shadows_did() -> None:
    far = FarWorker()
    submit(far)
    assert far.dispatcher.shadow(ROWS, lambda _: None)
    request, shadow = await far.sent()
    far.answer(shadow, ROWS, compute_ns=10**9)
    assert far.admission.max_rows == MAX_QUEUE_ROWS
    far.answer(request, ROWS, compute_ns=10**9)
    assert far.admission.max_rows == far.metric("mlp_queue_limit_rows") == MAX_QUEUE_ROWS // 2


@looped
async def test_without_a_worker_nothing_is_admitted_nor_run_again() -> None:
    far = FarWorker()
    outcomes = submit(far)
    far.link.connection_lost(None)
    assert [type(outcome) for outcome in outcomes] == [WorkerLostError]
    request = InferenceRequest(ROWS, ())
    for send in (far.dispatcher.submit, far.dispatcher.resubmit):
        with pytest.raises(NotReadyError):
            send(request, "eager", time.monotonic_ns(), outcomes.append, Ticket(far.metrics))
    assert not far.dispatcher.shadow(ROWS, outcomes.append)
    assert far.dispatcher.backends.states["eager"].state == "starting"


@looped
async def test_a_profile_is_no_inference_request_in_any_count() -> None:
    far = FarWorker()
    tickets = [far.dispatcher.profile(4, "fused", Path("trace.json"), lambda _: None) for _ in range(2)]
    counted = ("mlp_inflight_profiles", "mlp_inflight_requests", "mlp_queue_rows", "mlp_abandoned_total")
    await far.sent()
    assert [far.metric(name) for name in counted] == [2, 0, 0, 0]
    assert tickets[0].abandon()
    await far.sent()
    assert [far.metric(name) for name in counted] == [1, 0, 0, 0]
    far.link.connection_lost(None)
    assert [far.metric(name) for name in counted] == [0, 0, 0, 0]


@looped
async def test_nothing_is_shadowed_while_the_queue_is_filling_or_enough_wait_or_the_server_stops() -> None:
    far = FarWorker()
    shadow = partial(far.dispatcher.shadow, ROWS, lambda _: None)
    assert [shadow() for _ in range(MAX_SHADOWS + 3)] == [True] * MAX_SHADOWS + [False] * 3
    shadows = await far.sent()
    assert [frame.kind for frame in shadows] == [Kind.SHADOW] * MAX_SHADOWS
    assert (far.metric("mlp_queue_rows"), far.metric("mlp_inflight_requests")) == (0, 0)
    for frame in shadows:
        far.answer(frame, ROWS)
    submit(far, MAX_QUEUE_ROWS // 2 + 1)
    (inference,) = await far.sent()
    assert not shadow()
    far.answer(inference, np.zeros((MAX_QUEUE_ROWS // 2 + 1, 2), dtype=np.float32))
    assert shadow()
    far.state.start_draining()
    assert not shadow()
    assert len(await far.sent()) == 1


@looped
async def test_a_shadow_whose_time_is_up_keeps_its_place_until_the_worker_has_let_it_go() -> None:
    far = FarWorker(timeout_s=0.001)
    outcomes: asyncio.Queue[Result | Exception] = asyncio.Queue()
    shadow = partial(far.dispatcher.shadow, ROWS, outcomes.put_nowait)
    assert [shadow() for _ in range(MAX_SHADOWS)] == [True] * MAX_SHADOWS
    for _ in range(MAX_SHADOWS):
        assert isinstance(await outcomes.get(), DeadlineExceededError)
    assert not shadow()
    frames = await far.sent()
    asked, cancels = frames[:MAX_SHADOWS], frames[MAX_SHADOWS:]
    assert [(frame.kind, frame.request_id) for frame in cancels] == [(Kind.CANCEL, frame.request_id) for frame in asked]
    assert far.metric("mlp_inflight_requests") == 0
    far.let_go(cancels[0].request_id)
    far.answer(asked[1], ROWS)  # it was being computed already
    assert [shadow() for _ in range(3)] == [True, True, False]
    assert (far.metric("mlp_inflight_requests"), far.dispatcher.pool.shadows) == (0, MAX_SHADOWS)
    far.link.connection_lost(None)
    assert (far.dispatcher.pool.shadows, far.dispatcher.pool.unanswered) == (0, 0)
