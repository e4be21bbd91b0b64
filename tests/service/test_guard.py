"""What the guard makes of results, with a dispatcher whose worker is at the other end of a byte string."""

import asyncio
import json
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from models.engine import load_engine
from models.errors import BackendUnavailableError
from service.dispatch import Ticket
from service.errors import OverloadedError, RemoteError
from service.guard import FLOOR, MAX_DRIFT, Difference, Guard, difference
from service.inference import Inference, InferenceOptions, Predict
from service.link import Result
from service.reply import Reply
from service.schemas import InferenceRequest, Rows
from service.wire import Kind
from tests.made_model import made_fields
from tests.service.far_worker import BACKENDS, FarWorker, array, looped


class Rollout(FarWorker):
    """A guard that shadows everything, and the worker that it judges."""

    def __init__(self, shadow_rate: float = 1.0, max_drift: float = 0.02, floor: float = FLOOR["float32"]) -> None:
        super().__init__()
        self.guard = Guard(self.dispatcher, self.metrics, shadow_rate, max_drift, floor)

    async def state_after(self, inputs: Rows, answered: Rows, eager: Rows) -> str:
        """What becomes of fused, which answered that to inputs of which eager makes this."""
        self.guard.answered(InferenceRequest(inputs, ()), result(answered))
        (shadow,) = await self.sent()
        self.answer(shadow, eager)
        return self.dispatcher.backends.states["fused"].state


def result(rows: Rows, backend: str = "fused") -> Result:
    return Result(rows, backend, "onednn", 1, 1, 1, len(rows))


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
        assert rollout.dispatcher.backends.default() == "fused"
        rollout.guard.answered(InferenceRequest(answered, ()), result(answered))
        (shadow,) = await rollout.sent()
        assert (shadow.kind, BACKENDS[shadow.backend], shadow.rows) == (Kind.SHADOW, "eager", len(answered))
        rollout.answer(shadow, eager)
        state = rollout.dispatcher.backends.states["fused"]
        if reason is None:
            assert (state.state, rollout.dispatcher.backends.default()) == ("ready", "fused")
            return
        assert (state.state, rollout.dispatcher.backends.default()) == ("unavailable", "compiled")
        assert rollout.metric("mlp_backend_fallbacks_total", backend="fused", reason=reason) == 1
        with pytest.raises(BackendUnavailableError, match="puts it back"):
            rollout.dispatcher.submit(InferenceRequest(answered, ()), "fused", time.monotonic_ns(), print)
        rollout.dispatcher.backends.set_default("fused")
        assert (rollout.dispatcher.backends.states["fused"].state, rollout.dispatcher.backends.default()) == (
            "ready",
            "fused",
        )

    asyncio.run(judge())


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_backend_stays_whatever_the_size_of_the_inputs(tmp_path: Path, dtype: str, position: str) -> None:
    norm = {"kind": "rms", "position": position, "eps": 1e-6}
    fields = made_fields("edge", dim=64, hidden=256, depth=1, norm=norm)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    engine = load_engine(tmp_path, dtype=dtype, backends=("eager", "fused"))
    drawn = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    async def judge() -> None:
        rollout = Rollout(max_drift=MAX_DRIFT[dtype], floor=FLOOR[dtype])
        for power in (0, -20, -34, -35, -36, -37, -38, -39, -41, -46):
            rows = (drawn.double() * 10.0**power).float()
            fused, eager = (engine.run(rows, name).float().numpy() for name in ("fused", "eager"))
            assert await rollout.state_after(rows.numpy(), fused, eager) == "ready", f"1e{power}"

    asyncio.run(judge())


@pytest.mark.parametrize("dtype", list(FLOOR))
@pytest.mark.parametrize("inputs", [1.0, 0.0, None], ids=["of any size", "zero", "the least resolved"])
def test_a_wrong_backend_is_found_down_to_what_the_dtype_resolves(dtype: str, inputs: float | None) -> None:
    floor = FLOOR[dtype]
    eager = array([floor, -floor], [1.0, 1.0])
    wrong = array([floor, -floor * (1 + 2 * MAX_DRIFT[dtype])], [1.0, 1.0])
    rows = np.full_like(eager, floor if inputs is None else inputs)
    quarter = np.float32(0.25)

    async def judge() -> None:
        rollout = Rollout(max_drift=MAX_DRIFT[dtype], floor=floor)
        assert await rollout.state_after(rows, wrong, eager) == "unavailable"
        rollout.dispatcher.backends.set_default("fused")
        assert await rollout.state_after(rows, quarter * wrong, quarter * eager) == "ready"

    asyncio.run(judge())


@looped
async def test_what_a_backend_gave_before_it_was_put_back_says_nothing_of_it_any_more() -> None:
    rollout = Rollout()
    wrong, right = array([1.0, 9.0]), array([1.0, 4.0])
    for _ in range(2):
        rollout.guard.answered(InferenceRequest(right, ()), result(wrong))
    first, later = await rollout.sent()
    rollout.answer(first, right)
    assert rollout.dispatcher.backends.states["fused"].state == "unavailable"
    rollout.dispatcher.backends.set_default("fused")
    rollout.answer(later, right)
    assert rollout.dispatcher.backends.states["fused"].state == "ready"
    assert await rollout.state_after(right, wrong, right) == "unavailable"


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
    assert {state.state for state in rollout.dispatcher.backends.states.values()} == {"ready"}
    rollout.guard.failed("fused", RemoteError("internal", "RuntimeError: /home/someone/kernel.so: illegal access"))
    reason = rollout.dispatcher.backends.states["fused"].reason or ""
    assert "a run of it failed with RuntimeError: kernel.so: illegal access" in reason
    rollout.state.take_out(0, rollout.state.outage(2))  # type: ignore[arg-type]
    rollout.guard.failed("compiled", RemoteError("internal", "RuntimeError: x"))  # which nothing could replace
    assert rollout.dispatcher.backends.default() == "compiled"


class Asked(NamedTuple):
    """An inference request to a `Rollout`."""

    inference: Inference
    operation: Predict
    replies: list[Reply]
    ticket: Ticket | None

    def leave(self) -> None:
        """Let its caller go away."""
        assert self.ticket is not None
        self.inference.abandon(self.ticket, self.operation, {}, b"id", time.monotonic_ns())


def asked(rollout: Rollout, body: bytes = b'{"inputs": [1, 2]}') -> Asked:
    options = InferenceOptions("m", 2, None, 8, 1 << 10, None)
    inference, operation = Inference(rollout.dispatcher, options, rollout.metrics, rollout.guard), Predict(options)
    replies: list[Reply] = []
    headers = {b"content-type": b"application/json"}
    ticket = inference.start(operation, headers, body, b"id", time.monotonic_ns(), replies.append)
    return Asked(inference, operation, replies, ticket)


@looped
async def test_what_was_waiting_for_a_backend_when_it_was_taken_out_is_no_reply() -> None:
    rollout = Rollout()
    unnamed, named = asked(rollout), asked(rollout, b'{"inputs": [1, 2], "backend": "fused"}')
    waiting = await rollout.sent()
    rollout.dispatcher.backends.take_out("fused", "drift", "wrong")
    for frame in waiting:
        rollout.answer(frame, array([1.0, 9.0]))
    (again,) = await rollout.sent()
    assert (BACKENDS[again.backend], unnamed.replies) == ("compiled", [])
    assert [(reply.status, b"backend_unavailable" in reply.body) for reply in named.replies] == [(503, True)]
    rollout.answer(again, array([1.0, 4.0]))
    (reply,) = unnamed.replies
    assert (reply.status, json.loads(reply.body)["backend"]) == (200, "compiled")


@pytest.mark.parametrize("why", ["taken out", "not finite"])
def test_a_request_that_went_on_to_another_backend_is_cancelled_there_once_its_caller_leaves(why: str) -> None:
    async def leave() -> None:
        rollout = Rollout()
        leaving = asked(rollout)
        (first,) = await rollout.sent()
        if why == "taken out":
            rollout.dispatcher.backends.take_out("fused", "drift", "wrong")
        rollout.answer(first, array([1.0, np.nan if why == "not finite" else 9.0]))
        (again,) = await rollout.sent()
        assert (again.kind, BACKENDS[again.backend] != "fused") == (Kind.INFER, True)
        leaving.leave()
        assert [(each.kind, each.request_id) for each in await rollout.sent()] == [(Kind.CANCEL, again.request_id)]
        rollout.let_go(again.request_id)
        leaving.leave()  # which cancels nothing twice
        assert (await rollout.sent(), leaving.replies) == ([], [])
        assert (rollout.metric("mlp_abandoned_total"), rollout.metric("mlp_inflight_requests")) == (1, 0)

    asyncio.run(leave())
