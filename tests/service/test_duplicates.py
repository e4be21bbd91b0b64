"""A key that comes twice in a JSON body."""

import json
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.duplicates import duplicate, strings
from service.errors import BadRequestError
from service.openinference import parse_infer
from service.schemas import parse_json, parse_predict

TENSOR = b'{"name": "input", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]%b}'


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"inputs": [1, 2, 3], "inputs": [4, 5, 6]}', "inputs"),
        (b'{"inputs": [1, 2, 3], "backend": "eager", "id": "a", "backend": "eager"}', "backend"),
        (b'{"inputs": [1, 2, 3], "id": "a", "\\u0069d" : "b"}', "id"),
        (b'{"inputs": [1, 2, 3], "id": "say \\"{\\"", "id": null}', "id"),
        (b'{"inputs": "inputs", "inputs": [1, 2, 3]}', "inputs"),
    ],
    ids=str,
)
def test_a_body_that_has_a_key_twice_is_refused_by_its_name(body: bytes, name: str) -> None:
    for given_body in (body, bytearray(body)):
        with pytest.raises(BadRequestError, match=f"'{name}': expected once, got twice"):
            parse_predict(given_body, 3, 8)


@pytest.mark.parametrize(
    ("twice", "name"),
    [(b', "data": [4, 5, 6]', "data"), (b', "parameters": {"a": 1, "a": 1}', "a"), (b', "name": "input"', "name")],
    ids=str,
)
def test_a_tensor_that_has_a_key_twice_is_refused_too(twice: bytes, name: str) -> None:
    with pytest.raises(BadRequestError, match=f"'{name}': expected once, got twice"):
        parse_infer(b'{"inputs": [%b]}' % (TENSOR % twice), 3, 8)


@pytest.mark.parametrize("name", ["plain", 'say "hello"', "\\", '\\"', '{"id": "id"}', "a: {", "inputs", "é\n\ud7ff"])
def test_what_a_string_holds_is_no_key(name: str) -> None:
    body = json.dumps({"inputs": [1, 2, 3], "id": name}).encode()
    assert parse_predict(body, 3, 8).id == name


DOCUMENTS = st.recursive(
    st.none() | st.integers(0, 9) | st.text('ab"\\{}:,é', max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('ab"\\{}:', max_size=3), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=200)
@given(document=st.dictionaries(st.text("abc", max_size=2), DOCUMENTS, max_size=4), data=st.data())
def test_any_document_passes_and_none_does_with_a_key_twice(document: dict[str, Any], data: st.DataObject) -> None:
    body = orjson.dumps(document)
    assert duplicate(body, orjson.loads(body)) is None
    assert 2 * strings(document) <= body.count(b'"')
    if document:
        key = data.draw(st.sampled_from(sorted(document)))
        twice = b"{%b:%b,%b" % (orjson.dumps(key), orjson.dumps(data.draw(DOCUMENTS)), body[1:])
        assert duplicate(twice, orjson.loads(twice)) == key


@pytest.mark.parametrize(
    "many", [b'"1",' * 20_000 + b'"1"', b'"1",' * 200 + b"{}," * 20_000 + b"{}", b'["1"],' * 20_000 + b'["1"]'], ids=len
)
def test_more_strings_than_are_looked_through_are_refused(many: bytes) -> None:
    for body in (b'{"inputs": [%b]}' % many, b'{"inputs": [%b], "inputs": [1, 2, 3]}' % many):
        with pytest.raises(BadRequestError, match=r"at most 10000 strings, .* got 20[02]0\d|expected once, got twice"):
            parse_predict(body, 3, 8)


def test_deep_nesting_does_no_harm() -> None:
    body = b'{"a":' * 1000 + b'{"b":1,"b":2}' + b"}" * 1000
    with pytest.raises(BadRequestError, match="'b': expected once, got twice"):
        parse_json(body)


@pytest.mark.parametrize(
    "text", [b"\\n" * 200_000, b"\\n-" * 200_000, b"-" * 400_000], ids=["escapes", "mixed", "plain"]
)
def test_looking_through_a_long_string_takes_no_more_memory_than_the_string(text: bytes) -> None:
    body = b'{"inputs": [1, 2, 3], "id": "\\"%b"}' % text
    document = orjson.loads(body)
    tracemalloc.start()
    try:
        assert duplicate(body, document) is None
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 2 * len(body)
