from argparse import ArgumentTypeError
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from loadtests.flags import cpus, names, numbers, path, positive, rate, seconds, share, some_of, whole


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (whole, "7", 7),
        (positive, "0.5", 0.5),
        (share, "1", 1.0),
        (names, "a, b,,a", ["a", "b"]),
        (some_of(("a", "b")), "b,a", ["b", "a"]),
        (numbers(whole), "4,1,4", [4, 1]),
        (cpus, "0,2-3,3", frozenset({0, 2, 3})),
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
        (positive, "inf", "expected a number above 0, and at most 1e+09, got 'inf'"),
        (positive, "nan", "expected a number above 0, got 'nan'"),
        (whole, "1" * 5000, f"expected a whole number of at least 1, got '{'1' * 80}'"),
        (whole, "-1", "expected a whole number of at least 1, got '-1'"),
        (whole, "٣", "expected a whole number of at least 1, got '٣'"),
        (partial(whole, most=9), "10", "expected a whole number from 1 to 9, got '10'"),
        (rate, "1e9", "expected a number above 0, and at most 1e+06, got '1e9'"),
        (seconds, "1e-9", "expected seconds from 0.01 to 86400, got '1e-9'"),
        (seconds, "1e300", "expected seconds from 0.01 to 86400, got '1e300'"),
        (seconds, "nan", "expected seconds from 0.01 to 86400, got 'nan'"),
        (path, "", "expected a path, got ''"),
        (share, "1.1", "expected a number from 0 to 1, got '1.1'"),
        (names, " ,", "expected at least one name, got ' ,'"),
        (some_of(("a", "b")), "a,c", "expected some of a, b, got 'c'"),
        (numbers(whole), "1,,2", "expected a whole number of at least 1, got ''"),
        *(
            (cpus, text, f"expected cores as a list such as 0,2-3, from 0 to 65535, got {text!r}")
            for text in ("", "0,", "one", "3-1", "-1", "1-", "0x1", "0-65536", "٣", " 1")
        ),
    ],
    ids=lambda value: getattr(value, "__qualname__", str(value))[:40],
)
def test_what_is_no_such_value_is_refused(parse: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        parse(text)
    assert str(caught.value) == message
