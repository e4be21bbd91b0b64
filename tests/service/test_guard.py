"""What the guard makes of results, with a dispatcher whose worker is at the other end of a byte string."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.engine import BackendStatus
from models.errors import BackendUnavailableError
from service.dispatch import MAX_SHADOWS, Dispatcher, Result, WorkerLink
from service.errors import OverloadedError, RemoteError
from service.guard import Difference, Guard, difference
from service.metrics import Metrics
from service.profile import NullTransport, connected
from service.schemas import InferenceRequest, Rows
from service.shared_state import SharedState
from service.wire import Decoder, Frame, Kind
from tests.service.frames import packed
from tests.service.test_metrics import value

BACKENDS = ("eager", "compiled", "fused")
MAX_QUEUE_ROWS = 40


def array(*rows: list[float]) -> Rows:
    return np.array(rows, dtype=np.float32)


class Rollout:
    """A guard that shadows everything, and the worker's end of its one connection."""

    def __init__(self, shadow_rate: float = 1.0) -> None:
        self.metrics = Metrics(BACKENDS, 1)
        self.state = SharedState(1, len(BACKENDS))
        sockets = [Path("worker-0.sock")]
        self.dispatcher = Dispatcher(sockets, BACKENDS, self.state, MAX_QUEUE_ROWS, 30.0, self.metrics)
        self.link: WorkerLink
        self._transport: NullTransport
        self.link, self._transport = connected(
            self.dispatcher, dict.fromkeys(BACKENDS, BackendStatus("onednn", "ready"))
        )
        self.guard = Guard(self.dispatcher, self.metrics, shadow_rate, 0.02)
        self._decoder = Decoder()

    async def sent(self) -> list[Frame]:
        """What the worker got since the last time."""
        await asyncio.sleep(0)
        return self._decoder.feed(self._transport.take())

    def answer(self, frame: Frame, rows: Rows) -> None:
        """Let the worker answer a frame."""
        result = Frame(Kind.RESULT, frame.request_id, rows.tobytes(), frame.backend, len(rows), 1, 1, len(rows), 1)
        self.link.data_received(packed(result))

    def metric(self, name: str, **labels: str) -> float:
        return value(self.metrics.text().decode(), name, **labels)


def result(rows: Rows, backend: str = "fused") -> Result:
    return Result(rows, backend, "onednn", 1, 1, 1, len(rows))


def looped(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on an event loop."""

    def run() -> None:
        asyncio.run(test())

    run.__name__ = test.__name__
    return run


def test_a_difference_is_absolute_and_relative_to_the_rows_largest_reference() -> None:
    reference = array([1.0, -4.0], [100.0, 0.0], [0.0, 0.0])
    assert difference(reference + array([0.0, 0.5], [2.0, 0.0], [0.0, 0.0]), reference) == Difference(2.0, 0.125)
    assert difference(reference, reference) == Difference(0.0, 0.0)


@pytest.mark.parametrize(
    ("answered", "eager", "reason"),
    [
        (array([1.0, 4.0]), array([1.0, 4.07]), None),
        (array([1.0, 4.0]), array([1.0, 4.1]), "drift"),
        (array([np.nan, 4.0]), array([1.0, 4.0]), "non_finite"),
        (array([1.0, np.inf]), array([1.0, 4.0]), "non_finite"),
        (array([np.nan, 4.0], [1.0, 2.0]), array([np.inf, 4.0], [1.0, 2.0]), None),
        (array([np.nan, 4.0], [1.0, 2.0]), array([np.inf, 4.0], [1.0, 3.0]), "drift"),
        (array([1.0, 4.0]), array([np.nan, np.nan]), None),
    ],
    ids=["near", "far", "nan", "infinity", "both not finite", "another row is far", "only eager not finite"],
)
def test_a_backend_is_taken_out_for_what_eager_does_not_give(answered: Rows, eager: Rows, reason: str | None) -> None:
    async def judge() -> None:
        rollout = Rollout()
        assert rollout.dispatcher.default_backend() == "fused"
        rollout.guard.answered(InferenceRequest(answered, ()), result(answered))
        (shadow,) = await rollout.sent()
        assert (shadow.kind, BACKENDS[shadow.backend], shadow.rows) == (Kind.SHADOW, "eager", len(answered))
        rollout.answer(shadow, eager)
        state = rollout.dispatcher.states["fused"]
        if reason is None:
            assert (state.state, rollout.dispatcher.default_backend()) == ("ready", "fused")
            return
        assert (state.state, rollout.dispatcher.default_backend()) == ("unavailable", "compiled")
        assert rollout.metric("mlp_backend_fallbacks_total", backend="fused", reason=reason) == 1
        with pytest.raises(BackendUnavailableError, match="puts it back"):
            rollout.dispatcher.submit(InferenceRequest(answered, ()), "fused", time.monotonic_ns(), print)
        rollout.dispatcher.set_default_backend("fused")
        assert (rollout.dispatcher.states["fused"].state, rollout.dispatcher.default_backend()) == ("ready", "fused")

    asyncio.run(judge())


@looped
async def test_nothing_is_shadowed_while_the_queue_is_filling_or_enough_wait_or_the_server_stops() -> None:
    rollout = Rollout()
    rows = array([1.0, 2.0])
    for _ in range(MAX_SHADOWS + 3):
        rollout.guard.answered(InferenceRequest(rows, ()), result(rows))
    shadows = await rollout.sent()
    assert len(shadows) == MAX_SHADOWS
    assert (rollout.metric("mlp_queue_rows"), rollout.metric("mlp_inflight_requests")) == (0, 0)
    for shadow in shadows:
        rollout.answer(shadow, rows)
    half = np.zeros((MAX_QUEUE_ROWS // 2 + 1, 2), dtype=np.float32)
    rollout.dispatcher.submit(InferenceRequest(half, ()), "fused", time.monotonic_ns(), lambda _: None)
    (inference,) = await rollout.sent()
    assert inference.kind == Kind.INFER
    rollout.guard.answered(InferenceRequest(rows, ()), result(rows))
    assert await rollout.sent() == []
    rollout.answer(inference, half)
    rollout.guard.answered(InferenceRequest(rows, ()), result(rows))
    assert len(await rollout.sent()) == 1
    rollout.state.start_draining()
    rollout.guard.answered(InferenceRequest(rows, ()), result(rows))
    assert await rollout.sent() == []


@looped
async def test_eagers_own_replies_are_not_shadowed_and_no_share_means_none() -> None:
    rows = array([1.0, 2.0])
    rollout = Rollout()
    rollout.guard.answered(InferenceRequest(rows, ()), result(rows, "eager"))
    assert await rollout.sent() == []
    assert not Rollout(shadow_rate=0.0).guard.is_shadowing


@looped
async def test_only_a_run_that_raised_speaks_against_a_backend_and_the_last_one_stays() -> None:
    rollout = Rollout()
    for error in (OverloadedError("full"), RemoteError("backend_unavailable", "no memory"), RuntimeError("ours")):
        rollout.guard.failed("fused", error)
    rollout.guard.failed("eager", RemoteError("internal", "RuntimeError: x"))
    assert {state.state for state in rollout.dispatcher.states.values()} == {"ready"}
    rollout.guard.failed("fused", RemoteError("internal", "RuntimeError: /home/someone/kernel.so: illegal access"))
    reason = rollout.dispatcher.states["fused"].reason or ""
    assert "a run of it failed with RuntimeError: kernel.so: illegal access" in reason
    rollout.state.take_out(0, rollout.state.outage(2))  # type: ignore[arg-type]
    rollout.guard.failed("compiled", RemoteError("internal", "RuntimeError: x"))  # which nothing could replace
    assert rollout.dispatcher.default_backend() == "compiled"


@looped
async def test_a_canary_takes_its_share_unless_it_cannot_run() -> None:
    rollout = Rollout()
    rollout.dispatcher.set_canary({"eager": 0.25, "compiled": 0.25})
    drawn = [rollout.dispatcher.route() for _ in range(400)]
    assert {name: drawn.count(name) > 40 for name in BACKENDS} == dict.fromkeys(BACKENDS, True)
    assert rollout.dispatcher.default_backend() == "fused"
    rollout.dispatcher.take_out("compiled", "drift", "wrong")
    assert {rollout.dispatcher.route() for _ in range(200)} == {"eager", "fused"}
    rollout.dispatcher.set_canary({})
    assert {rollout.dispatcher.route() for _ in range(50)} == {"fused"}
