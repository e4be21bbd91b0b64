import contextlib
import itertools
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service import schemas
from service.errors import BadRequestError, NonFiniteOutputError, TooLargeError

WIDTH = 3


def parse(inputs: Any, **fields: Any) -> schemas.InferenceRequest:
    return schemas.parse_predict(orjson.dumps({"inputs": inputs, **fields}), WIDTH, max_rows=8)


@given(shape=st.lists(st.integers(1, 2), max_size=3), data=st.data())
def test_any_nesting_of_finite_numbers_becomes_the_rows_numpy_would_make(shape: list[int], data: st.DataObject) -> None:
    count = int(np.prod(shape)) * WIDTH
    numbers = st.one_of(st.floats(-1e30, 1e30), st.integers(-(2**53), 2**53))
    flat = data.draw(st.lists(numbers, min_size=count, max_size=count))
    expected = np.array(flat, dtype=np.float64).astype(np.float32).reshape(*shape, WIDTH)
    request = parse(np.array(flat, dtype=object).reshape(*shape, WIDTH).tolist())
    assert request.shape == tuple(shape)
    np.testing.assert_array_equal(request.rows, expected.reshape(-1, WIDTH))
    assert request.rows.flags.c_contiguous


def test_a_flat_list_is_one_row_without_leading_dimensions() -> None:
    request = parse([1, 2, 3])
    assert (request.rows.tolist(), request.shape) == ([[1.0, 2.0, 3.0]], ())


def test_the_optional_fields_are_carried() -> None:
    request = parse([1, 2, 3], backend="fused", id="seven", timeout_ms=250)
    assert (request.backend, request.id, request.timeout_s) == ("fused", "seven", 0.25)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "got an empty list"),
        ([[]], "got an empty list"),
        ([[1, 2, 3], []], r"inputs\[1\]: expected a list of 3, .*, got one of 0; each row has 3 numbers"),
        ([[1, 2, 3], [1, 2]], r"inputs\[1\]: expected a list of 3, .*, got one of 2; each row has 3 numbers"),
        ([[1, 2], [3]], r"inputs\[1\]: expected a list of 2, .*, got one of 1; each row has 3 numbers"),
        ([[[1, 2, 3]], [[1, 2, 3], [4, 5, 6]]], r"inputs\[1\]: expected a list of 1, .*, got one of 2"),
        ([[[1, 2, 3], [4, 5]]], r"inputs\[0\]\[1\]: expected a list of 3, .*, got one of 2"),
        ([[1, 2, 3], 4], r"inputs\[1\]: expected a list, .*, got a number"),
        ([[1, 2]], r"rows of 3 numbers, got 2 \(shape \(1, 2\)\)"),
        ([[1, 2, 3], [1, "2", 3]], r"inputs\[1\]\[1\]: expected a number, got a string: '2'"),
        ([[1, 2, None]], r"inputs\[0\]\[2\]: expected a number, got null"),
        ([[1, 2, True]], r"inputs\[0\]\[2\]: expected a number, got a boolean"),
        ([[1, {"a": 1}, 2]], r"inputs\[0\]\[1\]: expected a number, got an object"),
        ([[1e39, 2, 3]], r"within float32's range, up to 3.4e38, got 1e\+39"),
        ("abc", "expected a list of rows of 3 numbers, got a string"),
        (7, "expected a list of rows of 3 numbers, got a number"),
        (None, "expected a list of rows of 3 numbers, got null"),
    ],
    ids=str,
)
def test_inputs_that_are_no_rows_are_refused_by_name_and_place(inputs: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        parse(inputs)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "got an empty one"),
        (b"{", "not valid JSON"),
        (b'{"inputs": [[1, 2, NaN]]}', "not valid JSON"),
        (b'{"inputs": [[1, 2, Infinity]]}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[1, 2, 3]", "expected a JSON object with inputs, backend, id, timeout_ms, got a list"),
        (b"{}", "inputs: this field is required"),
        (b'{"inputs": [1, 2, 3], "input": 1}', "'input': no such field; expected one of inputs, backend"),
        (b'{"inputs": [1, 2, 3], "backend": 5}', "backend: expected a valid string, got 5"),
        (b'{"inputs": [1, 2, 3], "timeout_ms": 0}', "timeout_ms: expected greater than 0, got 0"),
        (b'{"inputs": [1, 2, 3], "timeout_ms": "soon"}', "timeout_ms: expected a valid number, got 'soon'"),
    ],
    ids=str,
)
def test_a_body_that_is_not_the_routes_is_refused_in_one_sentence(body: bytes, message: str) -> None:
    with pytest.raises(BadRequestError, match=message) as caught:
        schemas.parse_predict(body, WIDTH, 8)
    assert "\n" not in str(caught.value)


@settings(max_examples=300)
@given(data=st.data())
def test_any_damage_to_a_body_is_refused_or_leaves_rows_of_the_models_width(data: st.DataObject) -> None:
    whole = b'{"inputs": [[1, 2.5, -3], [4e1, 5, 6]], "backend": "eager", "id": "a", "timeout_ms": 5}'
    pieces = (b"-1", b"1e999", b"9" * 40, b"null", b"[[", b"]", b'"', b"\\ud800", b"\xff", b"NaN", b"1.5", b"{}")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole)))
        end = data.draw(st.integers(at, min(at + 8, len(whole))))
        whole = whole[:at] + data.draw(st.one_of(st.binary(max_size=4), st.sampled_from(pieces))) + whole[end:]
    with contextlib.suppress(BadRequestError, TooLargeError):
        rows = schemas.parse_predict(whole, WIDTH, 8).rows
        assert rows.shape[1] == WIDTH
        assert np.isfinite(rows).all()


@pytest.mark.parametrize("literal", [b"1" * 400, b"1e400", b"-1e400"], ids=["digits", "exponent", "negative"])
def test_a_number_beyond_a_double_is_refused(literal: bytes) -> None:
    with pytest.raises(BadRequestError):
        schemas.parse_predict(b'{"inputs": [1, 2, %s]}' % literal, WIDTH, 8)


def test_more_rows_than_the_bound_are_too_large() -> None:
    with pytest.raises(TooLargeError, match="at most 8 rows in one request, got 9"):
        parse([[1, 2, 3]] * 9)


def test_deep_nesting_is_refused_and_does_no_harm() -> None:
    with pytest.raises(BadRequestError):
        schemas.parse_predict(b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", WIDTH, 8)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_outputs_that_json_cannot_hold_are_refused_with_their_place(value: float) -> None:
    outputs = np.zeros((4, 2), dtype=np.float32)
    outputs[2, 1] = value
    with pytest.raises(NonFiniteOutputError, match="in 1 of 4 rows, the first being row 2"):
        schemas.require_finite(outputs)


def test_labels_follow_the_largest_output_and_the_leading_dimensions() -> None:
    outputs = np.array([[0, 1], [3, 2], [0, 9], [5, 4]], dtype=np.float32)
    labels = ("no", "yes")
    assert schemas.labels_of(outputs, labels, (2, 2)) == [["yes", "no"], ["yes", "no"]]
    assert schemas.labels_of(outputs[:1], labels, ()) == "yes"


def test_long_values_are_shortened_in_sentences() -> None:
    with pytest.raises(BadRequestError) as caught:
        parse([1, 2, 3], backend=list(itertools.repeat("x" * 50, 50)))
    assert len(str(caught.value)) < 200
