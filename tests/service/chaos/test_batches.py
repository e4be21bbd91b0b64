"""What shares a batch: neighbours of other shapes, and neighbours at fault."""

import json
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.service.running_server import RunningServer, Start

pytestmark = pytest.mark.slow  # real servers

BACKENDS = ("eager", "compiled", "fused")
Array = NDArray[np.float32]
Call = Callable[[], httpx.Response]


def asked(server: RunningServer, backend: str, values: Array, **fields: object) -> Call:
    """A call of `/predict`."""
    body = {"inputs": values.tolist(), **fields}
    return lambda: httpx.post(f"{server.url}/predict/{backend}", json=body, timeout=60)


def asked_in_binary(server: RunningServer, backend: str, values: Array, is_binary_reply: bool) -> Call:
    """A call of the protocol's inference, which carries what JSON cannot."""
    data = values.astype("<f4").tobytes()
    tensor = {"name": "input", "shape": values.shape, "datatype": "FP32", "parameters": {"binary_data_size": len(data)}}
    parameters = {"backend": backend, "binary_data_output": is_binary_reply}
    head = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    headers = {"inference-header-content-length": str(len(head))}
    url = server.url + "/v2/models/digits/infer"
    return lambda: httpx.post(url, content=head + data, headers=headers, timeout=60)


def outputs(reply: httpx.Response) -> Array:
    assert reply.status_code == 200, reply.text
    return np.array(reply.json()["outputs"], dtype=np.float32)


def pixels(*shape: int) -> Array:
    generator = np.random.default_rng(shape)
    return generator.integers(0, 17, (*shape, 64)).astype(np.float32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_of_any_shapes_in_one_batch_get_the_answers_that_they_get_alone(
    server: RunningServer, backend: str
) -> None:
    shapes = [(), (7,), (9,), (2, 3), (1, 1, 4), *[(1,)] * 20]
    calls = [asked(server, backend, pixels(*shape)) for shape in shapes]
    alone = [outputs(call()) for call in calls]
    replies = server.answers_together(calls)
    rows = sum(int(np.prod(shape)) for shape in shapes)
    assert {int(reply.headers["x-batch-rows"]) for reply in replies} == {rows}
    for shape, reply, expected in zip(shapes, replies, alone, strict=True):
        assert outputs(reply).shape == (*shape, 10)
        np.testing.assert_allclose(outputs(reply), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_at_fault_in_a_batch_fail_alone(server: RunningServer, backend: str) -> None:
    good = [asked(server, backend, pixels(3, index)) for index in range(1, 8)]
    alone = [outputs(call()) for call in good]
    wild = pixels(2)
    wild[1, 5] = np.nan
    huge = np.full((1, 64), 3e38, dtype=np.float32)
    at_fault = [
        asked_in_binary(server, backend, wild, is_binary_reply=False),
        asked_in_binary(server, backend, wild, is_binary_reply=True),
        asked_in_binary(server, backend, np.full_like(huge, np.inf), is_binary_reply=False),
        asked(server, backend, huge),
    ]
    alone_at_fault = [call() for call in at_fault]
    replies = server.answers_together([*good[:4], *at_fault, *good[4:]])
    for reply, expected in zip(replies[:4] + replies[8:], alone, strict=True):
        np.testing.assert_allclose(outputs(reply), expected, rtol=1e-5, atol=1e-5)
    rows = sum(3 * index for index in range(1, 8)) + 2 + 2 + 1 + 1
    assert int(replies[0].headers["x-batch-rows"]) == rows
    assert [reply.status_code for reply in replies[4:8]] == [reply.status_code for reply in alone_at_fault]
    assert (replies[4].status_code, replies[4].json()["code"]) == (422, "non_finite_output")
    sent = np.frombuffer(replies[5].content[int(replies[5].headers["inference-header-content-length"]) :], "<f4")
    assert np.isfinite(sent.reshape(2, 10)).all(-1).tolist() == [True, False]
    assert replies[6].status_code == 422
    assert server.metric("mlp_inflight_requests") == 0


def test_requests_of_more_rows_than_a_batch_are_answered_whole_and_counted_once(start: Start, tiny_model: Path) -> None:
    bounds = ("--max-batch-rows", "4", "--max-request-rows", "50", "--shadow-rate", "1")
    server = start("--model", str(tiny_model), "--backends", "eager,fused", *bounds).wait_ready()
    inputs = pixels(50)[:, :8] / 16
    answered: list[httpx.Response] = []
    for rows in (inputs[:11], inputs, *inputs[:, None]):
        answered.append(server.post("/predict", json={"inputs": rows.tolist()}))
        server.wait_until(  # its shadow, which is dropped where others are pending
            lambda: server.metric("mlp_shadow_drift_count", backend="fused") == len(answered)
        )
    replies, alone = answered[:2], answered[2:]
    expected = np.concatenate([outputs(reply) for reply in alone])
    for rows, reply in zip((11, 50), replies, strict=True):
        np.testing.assert_allclose(outputs(reply), expected[:rows], rtol=1e-5, atol=1e-5)
        assert (reply.json()["backend"], reply.headers["x-batch-rows"]) == ("fused", "4")
    assert server.metric("mlp_requests_total", backend="fused", status="200") == 2 + 50
    assert server.metric("mlp_batch_rows_sum", backend="fused") == 2 * 4 + 50
    assert (server.metric("mlp_queue_rows"), server.metric("mlp_backend_fallbacks_total")) == (0, 0)
    compared = server.post("/compare", json={"inputs": inputs.tolist()}).json()
    assert {name: each["batch_rows"] for name, each in compared["backends"].items()} == {"eager": 4, "fused": 4}
    assert compared["backends"]["fused"]["max_rel_diff"] < 1e-5
    told = server.get("/model").json()
    assert (told["max_request_rows"], told["max_batch_rows"]) == (50, 4)
    for path, body in (("/predict", {"inputs": [[0.5] * 8] * 51}), ("/profile", {"rows": 5})):
        assert server.post(path, json=body).status_code == 413
    assert server.stop() == 0


def test_requests_whose_time_is_up_are_answered_at_once_and_not_computed(server: RunningServer) -> None:
    late = [asked(server, "eager", pixels(5), timeout_ms=50) for _ in range(3)]
    timely = [asked(server, "eager", pixels(1)), asked(server, "eager", pixels(1))]
    late_before, accepted = server.metric("mlp_requests_total", status="504"), server.accepted()

    def are_late_ones_answered() -> bool:  # while the worker is still stopped
        is_answered = server.metric("mlp_requests_total", status="504") == late_before + 3
        return is_answered and server.accepted() == accepted + 5

    replies = server.answers_together([*late, *timely], are_late_ones_answered)
    assert [(reply.status_code, reply.json()["code"]) for reply in replies[:3]] == [(504, "deadline_exceeded")] * 3
    assert [int(reply.headers["x-batch-rows"]) for reply in replies[3:]] == [2, 2]
