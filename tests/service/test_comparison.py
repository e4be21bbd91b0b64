"""`POST /compare`, and what it measures by."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.requests import Request

from service.comparison import Comparison
from service.errors import NotReadyError
from service.guard import Guard, difference
from service.inference import InferenceOptions
from service.response import SCOPE_REQUEST_ID
from tests.service.far_worker import BACKENDS, FarWorker, array, looped
from tests.service.running_server import Start

ROWS = [[float((value * 7 + row) % 17) for value in range(64)] for row in range(3)]


@pytest.mark.slow
def test_every_ready_backend_is_run_and_compared_with_eager(client: httpx.Client) -> None:
    reply = client.post("/compare", json={"inputs": ROWS, "id": "mine"}).json()
    assert (reply["rows"], reply["reference"], reply["id"]) == (3, "eager", "mine")
    assert list(reply["backends"]) == ["eager", "compiled", "fused"]
    for name, entry in reply["backends"].items():
        alone = client.post(f"/predict/{name}", json={"inputs": ROWS}).json()
        assert entry["implementation"] == alone["implementation"]
        np.testing.assert_allclose(entry["outputs"], alone["outputs"], atol=1e-3)
        assert (entry["labels"], entry["batch_rows"]) == (alone["labels"], 3)
        assert 0 <= entry["queue_ms"] + entry["compute_ms"] <= entry["total_ms"]
        expected = difference(np.float32(entry["outputs"]), np.float32(reply["backends"]["eager"]["outputs"]))  # type: ignore[arg-type]
        assert (entry["max_abs_diff"], entry["max_rel_diff"]) == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert entry["max_rel_diff"] < 1e-4
    assert reply["backends"]["eager"]["max_abs_diff"] == 0


@pytest.mark.slow
def test_leading_dimensions_are_kept_and_only_the_named_are_shown_and_all_are_counted(
    client: httpx.Client, server: Any
) -> None:
    counted = {name: server.metric("mlp_requests_total", backend=name, status="200") for name in ("eager", "fused")}
    reply = client.post("/compare", json={"inputs": [[ROWS[0]], [ROWS[1]]], "backends": ["fused"]}).json()
    assert list(reply["backends"]) == ["fused"]
    assert np.shape(reply["backends"]["fused"]["outputs"]) == (2, 1, 10)
    assert reply["backends"]["fused"]["max_rel_diff"] < 1e-4  # from eager, which ran as well
    for name, before in counted.items():
        assert server.metric("mlp_requests_total", backend=name, status="200") == before + 1


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "inputs: this field is required"),
    ({"inputs": [[1.0] * 63]}, 400, "rows of 64 numbers, got 63"),
    ({"inputs": ROWS, "backends": ["turbo"]}, 400, "backends: expected one of eager, compiled, fused, got 'turbo'"),
    ({"inputs": ROWS, "backends": ["eager", "eager"]}, 400, "each at most once"),
    ({"inputs": ROWS, "backends": []}, 400, "backends: expected at least 1 of them, got 0"),
    ({"inputs": ROWS, "backends": ["eager"] * 5000}, 400, "backends: expected at most 16 of them, got 5000"),
    ({"inputs": ROWS, "id": "x" * 5000}, 400, "id: expected at most "),
    ({"inputs": ROWS, "backend": "eager"}, 400, "'backend': no such field"),
    ({"inputs": ROWS[:1] * 1025}, 413, "at most 1024 rows"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("body", "status", "message"), BAD, ids=[message for _, _, message in BAD])
def test_a_body_that_predict_would_refuse_is_refused(
    client: httpx.Client, body: dict[str, Any], status: int, message: str
) -> None:
    reply = client.post("/compare", json=body)
    assert reply.status_code == status
    assert message in reply.json()["error"]


@pytest.mark.slow
def test_a_backend_that_fails_is_an_entry_and_not_the_replys_end(start: Start, tiny_model: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    config["norm"]["kind"] = "none"  # so that gate times up overflows
    (tiny_model / "config.json").write_text(json.dumps(config))
    server = start("--model", str(tiny_model), "--backends", "fused,eager", "--api-servers", "2").wait_ready()

    def compare(**body: Any) -> Any:
        return server.post("/compare", json={"inputs": [[0.5] * 8]} | body).json()

    late = compare(timeout_ms=1e-6)["backends"]
    assert {entry["code"] for entry in late.values()} == {"deadline_exceeded"}
    (infinite,) = compare(inputs=[[3e38] * 8], backends=["fused"])["backends"].values()
    assert infinite["code"] == "non_finite_output"
    both = compare()["backends"]
    assert list(both) == ["fused", "eager"]
    assert not any("code" in entry for entry in both.values())


@pytest.mark.slow
def test_without_eager_there_are_no_differences_and_the_reason_is_given(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), "--backends", "fused", MLP_API_KEY="secret").wait_ready()
    body = json.dumps({"inputs": [0.5] * 8})
    assert server.post("/compare", content=body).status_code == 401
    reply = server.post("/compare", content=body, headers={"x-api-key": "secret"}).json()
    entry = reply["backends"]["fused"]
    assert (entry["max_abs_diff"], entry["max_rel_diff"]) == (None, None)
    assert entry["reason"].startswith("eager is not ready on this server")
    assert len(entry["outputs"]) == 8


def post(body: dict[str, Any]) -> Request:
    """A request to compare, whose caller stays."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    return Request({"type": "http", "headers": [], SCOPE_REQUEST_ID: b"id"}, receive)


def comparison_of(far: FarWorker) -> Comparison:
    options = InferenceOptions("m", 2, None, 8, 1 << 10, None)
    return Comparison(far.dispatcher, options, far.metrics, Guard(far.dispatcher, far.metrics))


@looped
async def test_while_no_worker_is_up_nothing_is_compared_whatever_is_taken_out() -> None:
    far = FarWorker()
    far.dispatcher.backends.take_out("compiled", "drift", "its result was wrong")
    far.link.connection_lost(None)
    for names in (["compiled", "fused"], list(BACKENDS)):
        with pytest.raises(NotReadyError):
            await comparison_of(far).answer(post({"inputs": [1, 2], "backends": names}))


@pytest.mark.parametrize("running", ["compiled", "fused"])
def test_a_backend_that_is_taken_out_meanwhile_is_unavailable_and_the_others_are_compared(running: str) -> None:
    async def compare() -> None:
        far = FarWorker()
        answer = asyncio.ensure_future(comparison_of(far).answer(post({"inputs": [1, 2]})))
        for name in BACKENDS:
            while not (frames := await far.sent()):
                assert not answer.done()
            (frame,) = frames
            assert BACKENDS[frame.backend] == name
            if name == running:
                far.dispatcher.backends.take_out("compiled", "drift", "its result was wrong")
            far.answer(frame, array([1.0, 4.0]))
        entries = json.loads((await answer)[1])["backends"]
        assert list(entries) == list(BACKENDS)
        assert {name: entry.get("max_abs_diff") for name, entry in entries.items()} == {
            "eager": 0,
            "compiled": None,
            "fused": 0,
        }
        taken_out = entries["compiled"]
        assert (set(taken_out), taken_out["code"]) == ({"error", "code"}, "backend_unavailable")
        assert "its result was wrong" in taken_out["error"]
        counted = {name: far.metric("mlp_requests_total", backend=name, status="200") for name in BACKENDS}
        assert counted == {"eager": 1, "compiled": 0, "fused": 1}
        assert far.metric("mlp_requests_total", backend="compiled", status="503") == 1

    asyncio.run(compare())
