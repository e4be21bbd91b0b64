import json
from typing import Any

import numpy as np
import pytest

from loadtests.inference import Inference, ReplyError, inference, outputs_of, require_answered, server_times_ms

ROWS = np.asarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
OUTPUTS = np.asarray([[0.5, -1.0], [2.0, float("nan")]], np.float32)
LENGTH = "inference-header-content-length"


def request(wire: str, backend: str | None = "fused") -> Inference:
    return inference(wire, "a model", ROWS, 2, backend, key="secret")


def reply(outputs: Any = OUTPUTS, **headers: str) -> tuple[dict[str, str], bytes]:
    head = b'{"outputs":[]}'
    return {"x-backend": "fused", LENGTH: str(len(head))} | headers, head + outputs.astype("<f4").tobytes()


def test_json_names_the_backend_in_the_path() -> None:
    assert request("json").path == "/predict/fused"
    assert request("json", None).path == "/predict"
    assert json.loads(request("json").body) == {"inputs": ROWS.tolist()}


def test_a_binary_body_is_its_json_part_then_little_endian_rows() -> None:
    sent = request("binary")
    assert sent.path == "/v2/models/a%20model/infer"
    length = int(sent.headers[LENGTH])
    (tensor,) = json.loads(sent.body[:length])["inputs"]
    assert tensor == {
        "name": "input",
        "shape": [2, 3],
        "datatype": "FP32",
        "parameters": {"binary_data_size": 24},
    }
    assert json.loads(sent.body[:length])["parameters"] == {"binary_data_output": True, "backend": "fused"}
    assert sent.body[length:] == ROWS.astype("<f4").tobytes()
    assert json.loads(request("binary", None).body[: -ROWS.nbytes])["parameters"] == {"binary_data_output": True}


@pytest.mark.parametrize("wire", ["json", "binary"])
def test_a_request_asks_for_no_compression_and_carries_the_key(wire: str) -> None:
    assert request(wire).headers["accept-encoding"] == "identity"
    assert request(wire).headers["x-api-key"] == "secret"
    assert "x-api-key" not in inference(wire, "m", ROWS, 2, None).headers


def test_the_statistics_tell_the_backends_apart() -> None:
    names = [request(wire, backend).name for wire in ("json", "binary") for backend in (None, "eager", "fused")]
    assert len(set(names)) == 6


def test_the_outputs_of_a_reply_are_read() -> None:
    headers, body = reply()
    np.testing.assert_array_equal(outputs_of(request("binary"), headers, body), OUTPUTS)
    body = json.dumps({"outputs": [[1, 2], [3, 4]]}).encode()
    np.testing.assert_array_equal(outputs_of(request("json"), headers, body), [[1, 2], [3, 4]])


@pytest.mark.parametrize("outputs", ["[[1, 2]]", "[[1, 2], [3]]", '"none"', "null"])
def test_json_outputs_of_another_shape_are_no_reply(outputs: str) -> None:
    with pytest.raises(ReplyError, match="expected 2 rows of 2 outputs"):
        outputs_of(request("json"), {"x-backend": "fused"}, f'{{"outputs": {outputs}}}'.encode())


def test_another_backend_s_reply_is_a_fault_unless_none_was_named() -> None:
    headers, body = reply(**{"x-backend": "eager"})
    with pytest.raises(ReplyError, match="expected header x-backend: fused, got eager"):
        require_answered(request("binary"), headers, body)
    require_answered(request("binary", None), headers, body)


def test_a_binary_reply_has_to_be_whole() -> None:
    headers, body = reply()
    with pytest.raises(ReplyError, match="expected 16 bytes of tensor after the reply's JSON, got 12"):
        require_answered(request("binary"), headers, body[:-4])
    del headers[LENGTH]
    with pytest.raises(ReplyError, match=LENGTH):
        require_answered(request("binary"), headers, body)


def test_the_server_s_times_are_read_in_milliseconds() -> None:
    assert server_times_ms({"x-queue-us": "40", "x-compute-us": "1250"}) == {"QUEUE": 0.04, "COMPUTE": 1.25}
    with pytest.raises(ReplyError, match="x-compute-us"):
        server_times_ms({"x-queue-us": "40"})
