from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from loadtests.flags import names, numbers, positive, share, some_of, whole


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (whole, "7", 7),
        (positive, "0.5", 0.5),
        (share, "1", 1.0),
        (names, "a, b,,a", ["a", "b"]),
        (some_of(("a", "b")), "b,a", ["b", "a"]),
        (numbers(whole), "4,1,4", [4, 1]),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value)),
)
def test_a_value_is_parsed(parse: Callable[[str], Any], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (whole, "0", "expected a whole number of at least 1, got '0'"),
        (whole, "1.5", "expected a whole number of at least 1, got '1.5'"),
        (positive, "inf", "expected a number above 0, got 'inf'"),
        (positive, "nan", "expected a number above 0, got 'nan'"),
        (share, "1.1", "expected a number from 0 to 1, got '1.1'"),
        (names, " ,", "expected at least one name, got ' ,'"),
        (some_of(("a", "b")), "a,c", "expected some of a, b, got 'c'"),
        (numbers(whole), "1,,2", "expected a whole number of at least 1, got ''"),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value)),
)
def test_what_is_no_such_value_is_refused(parse: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        parse(text)
    assert str(caught.value) == message
