from typing import Any

import numpy as np
import orjson
import pytest

from service.errors import BadRequestError, TooLargeError
from service.openinference import model_metadata, parse_infer
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
        ([body()], "expected a JSON object"),
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


def test_metadata_names_one_input_and_one_output_of_any_row_count() -> None:
    described = model_metadata("m", 3, 5).model_dump()
    assert described["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 3]}]
    assert described["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1, 5]}]
