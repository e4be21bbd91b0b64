import contextlib
import re
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.errors import BadRequestError, TooLargeError
from service.openinference import json_length, model_metadata, parse_infer
from service.schemas import InferenceRequest

WIDTH = 3


def body(**changes: Any) -> dict[str, Any]:
    tensor = {"name": "input", "shape": [2, 3], "datatype": "FP32", "data": [1, 2, 3, 4, 5, 6]}
    tensor |= changes.pop("tensor", {})
    return {"inputs": [tensor]} | changes


def parse(document: Any) -> InferenceRequest:
    return parse_infer(orjson.dumps(document), WIDTH, max_rows=8)


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6], [[1, 2, 3], [4, 5, 6]]], ids=["flat", "nested"])
@pytest.mark.parametrize("datatype", ["FP32", "FP64", "FP16"])
def test_data_may_be_flat_or_nested_in_every_float_type(data: Any, datatype: str) -> None:
    request = parse(body(tensor={"data": data, "datatype": datatype}))
    np.testing.assert_array_equal(request.rows, np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32))
    assert request.shape == (2,)


def test_leading_dimensions_are_kept() -> None:
    assert parse(body(tensor={"shape": [1, 2, 3]})).shape == (1, 2)


def test_the_backend_and_the_timeout_are_parameters() -> None:
    request = parse(body(id="a", parameters={"backend": "eager", "timeout": 1500}, outputs=[{"name": "output"}]))
    assert (request.id, request.backend, request.timeout_s) == ("a", "eager", 0.0015)


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({}, "inputs: this field is required"),
        ({"inputs": []}, r"expected one tensor, named 'input', got \[\]"),
        (body(tensor={"name": "x"}), r"named 'input', got \['x'\]"),
        ({"inputs": body()["inputs"] * 2}, r"got \['input', 'input'\]"),
        (body(outputs=[{"name": "logits"}]), r"named 'output', got \['logits'\]"),
        (body(tensor={"datatype": "INT8"}), "expected one of FP32, FP64, FP16, got 'INT8'"),
        (body(tensor={"datatype": "BF16"}), "expected one of FP32, FP64, FP16, got 'BF16'"),
        (body(tensor={"shape": [2, 4]}), r"expected \(..., 3\), got \(2, 4\)"),
        (body(tensor={"shape": []}), "inputs.0.shape"),
        (body(tensor={"shape": [-2, 3]}), "expected greater than or equal to 0, got -2"),
        (body(tensor={"shape": [0, 3], "data": []}), "at least one row"),
        (body(tensor={"shape": ["2", 3]}), "expected a valid integer, got '2'"),
        (body(tensor={"data": [1, 2, 3]}), r"expected 6 numbers for shape \(2, 3\), got 3"),
        (body(tensor={"data": [[1, 2, 3]]}), r"flat or nested as shape \(2, 3\) says, got \(1, 3\)"),
        (body(tensor={"data": [1, 2, 3, 4, 5, "6"]}), "expected a number, got a string"),
        (body(parameters={"priority": 1}), "parameters.priority: no such field"),
        (body(parameters={"backend": 3}), "parameters.backend: expected a valid string, got 3"),
        (body(parameters=[]), "^parameters: expected an object, got a list$"),
        (body(inputs=[5]), "^inputs.0: expected an object, got a number$"),
        (body(tensor={"parameters": "x"}), "^inputs.0.parameters: expected an object, got a string$"),
        ([body()], "^expected a JSON object with id, model_name, parameters, inputs, outputs, got a list$"),
    ],
    ids=str,
)
def test_a_body_that_the_protocol_or_the_model_does_not_take_is_refused(document: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        parse(document)


@pytest.mark.parametrize("shape", [[9, 3], [2**40, 2**40, 3], [2**33, 3]], ids=str)
def test_a_shape_of_too_many_rows_is_refused_before_its_product_can_overflow(shape: list[int]) -> None:
    with pytest.raises(TooLargeError, match="at most 8 rows"):
        parse(body(tensor={"shape": shape}))


@pytest.mark.parametrize("largest", [65504, -65504, 65519])  # the last is rounded to the first
def test_fp16_numbers_are_taken_up_to_its_range(largest: float) -> None:
    data = [[1, 2, 3], [4, 5, largest]]
    rows = parse(body(tensor={"datatype": "FP16", "shape": [2, 3], "data": data})).rows
    np.testing.assert_array_equal(rows, np.array(data, dtype=np.float32))


@pytest.mark.parametrize("beyond", [65520, -1e5, 3e38])
@pytest.mark.parametrize("is_flat", [False, True], ids=["nested", "flat"])
def test_fp16_numbers_beyond_its_range_are_refused(beyond: float, is_flat: bool) -> None:
    data = [1, 2, 3, 4, 5, beyond] if is_flat else [[1, 2, 3], [4, 5, beyond]]
    with pytest.raises(BadRequestError, match=r"within FP16's range, up to 65504, got "):
        parse(body(tensor={"datatype": "FP16", "shape": [2, 3], "data": data}))
    assert parse(body(tensor={"shape": [2, 3], "data": data})).rows[1, 2] == np.float32(beyond)


BINARY = {"FP32": "<f4", "FP64": "<f8", "FP16": "<f2"}
NUMBERS = np.array([[1, 2, 3], [4, 5, -6.5]])


def binary_body(data: bytes, datatype: str, **changes: Any) -> tuple[bytes, int]:
    tensor = {"name": "input", "shape": [2, 3], "datatype": datatype, "parameters": {"binary_data_size": len(data)}}
    tensor |= changes.pop("tensor", {})
    head = orjson.dumps({"inputs": [tensor]} | changes)
    return head + data, len(head)


@pytest.mark.parametrize("datatype", [*BINARY, "BF16"])
def test_binary_data_of_every_float_type_becomes_the_same_rows(datatype: str) -> None:
    if datatype == "BF16":
        data = (NUMBERS.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    else:
        data = NUMBERS.astype(BINARY[datatype]).tobytes()
    whole, length = binary_body(data, datatype, parameters={"binary_data_output": True})
    request = parse_infer(whole, WIDTH, 8, length)
    np.testing.assert_array_equal(request.rows, NUMBERS.astype(np.float32))
    assert request.is_binary_reply


@pytest.mark.parametrize("datatype", BINARY)
def test_binary_data_may_hold_nan_and_infinity(datatype: str) -> None:
    numbers = np.array([[np.nan, np.inf, -np.inf], [0, 0, 0]], dtype=BINARY[datatype])
    whole, length = binary_body(numbers.tobytes(), datatype)
    np.testing.assert_array_equal(parse_infer(whole, WIDTH, 8, length).rows, numbers.astype(np.float32))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("datatype", ["FP64", "FP16"])
def test_binary_data_may_hold_signalling_nan(datatype: str) -> None:
    one = {"FP64": 0x7FF0000000000001, "FP16": 0x7C01}[datatype]
    numbers = np.full(6, one, dtype=BINARY[datatype].replace("f", "u"))
    whole, length = binary_body(numbers.tobytes(), datatype)
    assert np.isnan(parse_infer(whole, WIDTH, 8, length).rows).all()


@pytest.mark.parametrize("beyond", [1e300, -3.5e38])
def test_binary_numbers_that_float32_cannot_hold_are_refused_as_those_in_json_are(beyond: float) -> None:
    whole, length = binary_body(np.array([1, 2, np.inf, 4, beyond, 6], dtype="<f8").tobytes(), "FP64")
    with pytest.raises(BadRequestError, match=re.escape(f"within float32's range, up to 3.4e38, got {beyond:g}")):
        parse_infer(whole, WIDTH, 8, length)


def test_an_outputs_own_parameter_wins_over_the_requests() -> None:
    outputs = [{"name": "output", "parameters": {"binary_data": False}}]
    document = body(parameters={"binary_data_output": True}, outputs=outputs)
    assert not parse_infer(orjson.dumps(document), WIDTH, 8).is_binary_reply


PIECES = (b"-1", b"1e999", b"9" * 40, b"null", b"[[", b"]", b'"', b"\\ud800", b"\xff", b'"shape":[0,3]', b"NaN", b"1.5")
FLOATS = NUMBERS.astype("<f4").tobytes()


@pytest.mark.parametrize(
    ("whole", "length", "message"),
    [
        (*binary_body(FLOATS[:-1], "FP32"), "expected 24 for FP32"),
        (*binary_body(FLOATS + b"x", "FP32"), "expected 24 for FP32"),
        (*binary_body(FLOATS, "FP64"), "expected 48 for FP64"),
        (*binary_body(FLOATS, "INT32"), "expected one of FP16, BF16, FP32, FP64, got 'INT32'"),
        (*binary_body(FLOATS, "FP32", tensor={"data": [1]}), "got both"),
        (*binary_body(FLOATS, "FP32", tensor={"parameters": {"binary_data_size": -1}}), "binary_data_size"),
        (*binary_body(FLOATS, "FP32", tensor={"parameters": {}}), "this field is required, or parameters.binary"),
        (*binary_body(FLOATS, "FP32", tensor={"shape": [2**40, 3]}), "at most 8 rows"),
        (b"{}", 99, "at most the body's 2 bytes, got 99"),
        (orjson.dumps(body()) + b"tail", len(orjson.dumps(body())), "expected nothing after the JSON part"),
        (binary_body(FLOATS, "FP32")[0][:-4], binary_body(FLOATS, "FP32")[1], "expected 24 bytes of binary data"),
    ],
    ids=str,
)
def test_binary_framing_that_does_not_add_up_is_refused(whole: bytes, length: int, message: str) -> None:
    with pytest.raises((BadRequestError, TooLargeError), match=message):
        parse_infer(whole, WIDTH, 8, length)


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_to_a_body_is_refused_or_leaves_rows_of_the_models_width(data: st.DataObject) -> None:
    whole, length = binary_body(FLOATS, "FP32", id="a", outputs=[{"name": "output"}])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(at, min(at + 8, len(whole))))
        whole = whole[:at] + data.draw(st.one_of(st.binary(max_size=4), st.sampled_from(PIECES))) + whole[end:]
    told = data.draw(st.one_of(st.just(length), st.none(), st.integers(0, len(whole) + 2)))
    with contextlib.suppress(BadRequestError, TooLargeError):
        rows = parse_infer(whole, WIDTH, 8, told).rows
        assert rows.shape[1] == WIDTH
        assert 1 <= len(rows) <= 8


@pytest.mark.parametrize("value", [b"-1", b"1e3", b"", b" 5", b"9" * 40, b"\xff"], ids=repr)
def test_a_length_header_that_is_no_number_is_refused(value: bytes) -> None:
    with pytest.raises(BadRequestError, match="expected a number of bytes"):
        json_length(value)


def test_metadata_names_one_input_and_one_output_of_any_row_count() -> None:
    described = model_metadata("m", 3, 5).model_dump()
    assert described["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 3]}]
    assert described["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 5]}]


def test_the_body_may_repeat_the_paths_model_and_no_other() -> None:
    whole = orjson.dumps(body(model_name="digits"))
    assert len(parse_infer(whole, WIDTH, 8, model="digits").rows) == 2
    with pytest.raises(BadRequestError, match=r"model_name: the path has 'other', the body 'digits'"):
        parse_infer(whole, WIDTH, 8, model="other")
