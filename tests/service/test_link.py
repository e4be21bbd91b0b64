"""One connection to a worker, with the worker at the other end of a byte string."""

import asyncio
import logging
import time

import pytest

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
async def test_what_is_answered_or_abandoned_is_not_in_flight_any_more_though_a_hung_worker_holds_it() -> None:
    far = FarWorker()

    async def seen() -> tuple[float, float, int]:
        await far.sent()
        return far.metric("mlp_inflight_requests"), far.metric("mlp_queue_rows"), far.link.requests

    late: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    far.link.send(ROWS, 0, time.monotonic_ns(), 0.001, late.set_result)
    abandoned, _ = send(far, []), send(far, [])
    assert isinstance(await late, DeadlineExceededError)
    assert await seen() == (2, 3, 3)
    far.link.abandon(abandoned)
    assert await seen() == (1, 3, 3)
    far.link.fail_all(DrainingError("the end"))
    assert await seen() == (0, 3, 3)
    far.let_go(abandoned)
    assert await seen() == (0, 2, 2)
    send(far, [])
    assert await seen() == (1, 3, 3)
    far.link.connection_lost(None)
    assert await seen() == (0, 0, 0)


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


def test_a_worker_that_answers_nothing_is_told_once_and_again_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "service.link"]

    async def judge() -> None:
        far = FarWorker(timeout_s=0.05)
        outcomes: list[Outcome] = []
        for _ in range(2):  # the second time like the first
            caplog.clear()
            send(far, outcomes, timeout_s=0.001)  # which ends before, and is held on
            while not warnings():
                await asyncio.sleep(0.001)
            late: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
            far.link.send(ROWS, 0, time.monotonic_ns(), 0.1, late.set_result)
            assert isinstance(await late, DeadlineExceededError)
            assert [line.partition(";")[0] for line in warnings()] == [
                "worker-0: no answer for 0.05 s while it holds 1 requests"
            ]
            first, second = [frame for frame in await far.sent() if frame.kind == Kind.INFER]
            far.answer(first, ROWS)
            far.answer(second, ROWS)
            assert len(warnings()) == 2
            assert warnings()[1].startswith("worker-0: answers again, after ")

    caplog.set_level(logging.WARNING, "service.link")
    asyncio.run(judge())


def test_a_worker_with_nothing_to_do_is_not_silent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    hour_ns = 3600 * 10**9
    now_ns = time.monotonic_ns

    async def judge() -> None:
        far = FarWorker()
        with monkeypatch.context() as patch:
            patch.setattr(time, "monotonic_ns", lambda: now_ns() - hour_ns)
            send(far, [], timeout_s=7200)
            (frame,) = await far.sent()
            far.answer(frame, ROWS)
        late: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        far.link.send(ROWS, 0, time.monotonic_ns(), 0.001, late.set_result)
        assert isinstance(await late, DeadlineExceededError)

    asyncio.run(judge())
    assert caplog.messages == []
