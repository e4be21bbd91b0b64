"""One connection to a worker, with the worker at the other end of a byte string."""

import asyncio
import time

from service.errors import DeadlineExceededError, DrainingError
from service.link import Result
from service.wire import Kind
from tests.service.far_worker import FarWorker, array, looped

ROWS = array([1.0, 2.0])
Outcome = Result | Exception


def send(far: FarWorker, outcomes: list[Outcome], timeout_s: float = 30.0) -> int:
    return far.link.send(ROWS, 0, time.monotonic_ns(), timeout_s, outcomes.append)


@looped
async def test_an_abandoned_request_is_cancelled_once_and_its_late_result_dropped() -> None:
    far = FarWorker()
    outcomes: list[Outcome] = []
    request_id = send(far, outcomes)
    assert [far.link.abandon(request_id), far.link.abandon(request_id), far.link.abandon(99)] == [True, False, False]
    infer, cancel = await far.sent()
    assert (infer.kind, cancel.kind, cancel.request_id) == (Kind.INFER, Kind.CANCEL, request_id)
    assert far.link.rows == 1  # until the worker says what became of it
    far.answer(infer, ROWS)
    assert (outcomes, far.link.rows, far.link.requests) == ([], 0, 0)


@looped
async def test_each_request_has_its_own_deadline() -> None:
    far = FarWorker()
    patient: list[Outcome] = []
    send(far, patient)
    late: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    far.link.send(ROWS, 0, time.monotonic_ns(), 0.001, late.set_result)
    outcome = await late
    assert isinstance(outcome, DeadlineExceededError)
    assert "no result within 1 ms" in str(outcome)
    assert patient == []
    for frame in await far.sent():
        far.answer(frame, ROWS)
    assert len(patient) == 1
    assert far.link.rows == 0


@looped
async def test_an_outcome_that_cannot_be_delivered_harms_no_other() -> None:
    far = FarWorker()
    outcomes: list[Outcome] = []

    def fails(_: Outcome) -> None:
        raise RuntimeError("not here")

    far.link.send(ROWS, 0, time.monotonic_ns(), 30.0, fails)
    send(far, outcomes)
    far.link.fail_all(DrainingError("the end"))
    assert [str(outcome) for outcome in outcomes] == ["the end"]
