"""Flags: their help with defaults, errors in one line, and parsers of values, which say what they expected and got."""

import argparse
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that are one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, "", []) or isinstance(action.default, bool):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def whole(text: str, least: int = 1) -> int:
    """Parse a whole number of at least so much."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return number


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return number


def names(text: str) -> list[str]:
    """Parse a comma-separated list of at least one name; each is kept once."""
    found = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not found:
        raise argparse.ArgumentTypeError(f"expected at least one name, got {text!r}")
    return found


def some_of(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    """Return what parses a comma-separated list of names that are known."""

    def parse(text: str) -> list[str]:
        found = names(text)
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {name!r}")
        return found

    return parse


def numbers(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Return what parses a comma-separated list of numbers; each is kept once."""

    def parse_all(text: str) -> list[T]:
        return list(dict.fromkeys(parse(each) for each in text.split(",")))

    return parse_all
