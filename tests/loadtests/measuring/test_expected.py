import json

import numpy as np
import pytest

from loadtests.generator.tally import Sample
from loadtests.generator.target import PAYLOADS, POOL_ROWS, Target, address, payloads, pool
from loadtests.measuring.expected import Expected

TARGET = Target("127.0.0.1", 8000, "digits", "json", 4, 2, seed=0)
OUTPUTS = np.random.default_rng(1).normal(size=(POOL_ROWS, 2)).astype(np.float32)
HEAD = b"HTTP/1.1 200 OK\r\nX-Backend: fused\r\n\r\n"


def sample(outputs: np.ndarray, payload: int = 3, rows: int = 5) -> Sample:
    body = json.dumps({"outputs": outputs.tolist()}).encode()
    return Sample("fused", rows, payload, HEAD, body)


def right(payload: int = 3, rows: int = 5) -> np.ndarray:
    return OUTPUTS[list(payloads(TARGET, "fused", rows)[payload].rows)].copy()


def test_requests_hold_the_rows_of_the_pool_that_they_name_and_begin_at_different_ones() -> None:
    made = payloads(TARGET, "fused", 5)
    assert len(made) == PAYLOADS
    assert len({each.rows for each in made}) == PAYLOADS
    for each in made:
        inputs = json.loads(each.request.partition(b"\r\n\r\n")[2])["inputs"]
        np.testing.assert_array_equal(np.asarray(inputs, np.float32), pool(TARGET)[list(each.rows)])


def test_rounding_is_let_pass_and_anything_more_is_a_wrong_answer() -> None:
    expected = Expected(OUTPUTS, "float32")
    assert expected.compare(TARGET, sample(right())) is None
    near, far = right(), right()
    near[2, 1] += expected.bound / 2
    far[2, 1] += expected.bound * 2
    assert expected.compare(TARGET, sample(near)) is None
    assert "wrong answer from fused: row 2 of 5" in str(expected.compare(TARGET, sample(far)))


def test_a_neighbour_s_row_is_a_wrong_answer_in_every_dtype() -> None:
    for dtype in ("float32", "float16", "bfloat16"):
        assert Expected(OUTPUTS, dtype).compare(TARGET, sample(np.roll(right(), 1, axis=0))) is not None


def test_a_number_that_is_none_is_a_wrong_answer() -> None:
    broken = right()
    broken[4, 0] = np.nan
    assert "row 4" in str(Expected(OUTPUTS, "float32").compare(TARGET, sample(broken)))


def test_too_few_rows_are_a_wrong_answer() -> None:
    assert "expected 5 rows" in str(Expected(OUTPUTS, "float32").compare(TARGET, sample(right()[:4])))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://127.0.0.1:8000", "http://", "http://h/path", "http://h:x"])
def test_an_address_that_cannot_be_loaded_is_refused(url: str) -> None:
    with pytest.raises(Exception, match="--url"):
        address(url)


def test_an_address_may_leave_the_port_out() -> None:
    assert address("http://127.0.0.1:8000/") == ("127.0.0.1", 8000)
    assert address("http://example.org") == ("example.org", 80)
