"""The error tree: the docstring is the tree, and errors survive a process boundary."""

import inspect
import pickle
import re

import pytest

from models import errors
from models.errors import BackendUnavailableError, MLPError, UnknownBackendError, first_line, shown


def tree() -> set[str]:
    return {name for name, it in vars(errors).items() if inspect.isclass(it) and issubclass(it, Exception)}


def test_the_docstring_names_every_error_and_no_other() -> None:
    assert errors.__doc__ is not None
    assert set(re.findall(r"\b\w+Error\b", errors.__doc__)) == tree()


def test_every_error_has_the_one_root() -> None:
    assert all(issubclass(getattr(errors, name), MLPError) for name in tree())


def test_an_unknown_backend_lists_the_known_ones() -> None:
    assert str(UnknownBackendError("fuse", ("eager", "fused"))) == "backend: expected one of eager, fused, got 'fuse'"


def test_an_unavailable_backend_says_why_and_which_are_there() -> None:
    error = BackendUnavailableError("compiled", "no C++ compiler was found", ["eager", "fused"])
    assert str(error) == ("backend 'compiled' is unavailable: no C++ compiler was found; available: eager, fused")
    assert str(BackendUnavailableError("eager", "it broke", [])).endswith("available: none")


@pytest.mark.parametrize(
    "error",
    [UnknownBackendError("a", ("b", "c")), BackendUnavailableError("a", "b", ("c",))],
    ids=lambda e: type(e).__name__,
)
def test_errors_survive_pickling(error: MLPError) -> None:
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301, our own bytes
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_a_first_line_is_one_and_of_a_bounded_length() -> None:
    assert first_line(ValueError("first\nsecond")) == "ValueError: first"
    assert first_line(KeyError()) == first_line(KeyError(" \n")).partition(":")[0] == "KeyError"
    assert first_line(RuntimeError("")) == "RuntimeError"
    assert len(first_line(ValueError("x" * 1000))) == 200


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        ("é", '"é"'),
        ("a\n\x1b[31m", r'"a\n\u001b[31m"'),
        ("\u202e", r"""'"\u202e"'"""),
        ({1}, "a value of type set"),
        (10**5000, "a value of type int"),
        ("x" * 1000, '"' + "x" * 56 + "..."),
    ],
    ids=["null", "text", "control", "direction", "no JSON", "long integer", "long text"],
)
def test_a_value_is_shown_as_its_json_in_one_short_line(value: object, text: str) -> None:
    assert shown(value) == text
