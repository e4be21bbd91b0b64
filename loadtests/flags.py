"""Flags: their help with defaults, errors in one line, and parsers of values, which say what they expected and got."""

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")

MOST = 10**15
MOST_CONNECTIONS = 1 << 16
MOST_ROUNDS = 1000
MOST_ROWS = 1 << 20
MOST_CPU = (1 << 16) - 1
DIGITS = 16
MOST_NUMBER = 1e9
SHORTEST_S = 0.01
DAY_S = 86_400
MOST_RATE = 1e6  # requests a second; far more than a process can send
CPUS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)  # a core, or a range of them
SHOWN = 80  # characters of what was given


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


def whole(text: str, least: int = 1, most: int = MOST) -> int:
    """Parse a whole number from one to another."""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else least - 1
    if not least <= number <= most:
        bounds = f"of at least {least}" if most == MOST else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text[:SHOWN]!r}")
    return number


def up_to(most: int) -> Callable[[str], int]:
    """Return what parses a whole number from 1 to `most`."""
    return partial(whole, most=most)


def positive(text: str, most: float = MOST_NUMBER) -> float:
    """Parse a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= most:
        bounds = f"above 0, and at most {most:g}" if number > 0 else "above 0"
        raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {text[:SHOWN]!r}")
    return number


def seconds(text: str) -> float:
    """Parse a time from a hundredth of a second to a day."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not SHORTEST_S <= number <= DAY_S:
        raise argparse.ArgumentTypeError(f"expected seconds from {SHORTEST_S:g} to {DAY_S}, got {text[:SHOWN]!r}")
    return number


def rate(text: str) -> float:
    """Parse requests a second."""
    return positive(text, MOST_RATE)


def path(text: str) -> Path:
    """Parse a path; an empty one would be the working directory."""
    if not text or "\0" in text:
        raise argparse.ArgumentTypeError(f"expected a path, got {text[:SHOWN]!r}")
    return Path(text)


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text!r}")
    return number


def cpus(text: str) -> frozenset[int]:
    """Parse a list of cores such as `0,2-3`.

    Source: https://man7.org/linux/man-pages/man7/cpuset.7.html, the list format.
    """
    found: set[int] = set()
    for part in text.split(","):
        ends = CPUS.fullmatch(part)
        low, high = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if not low <= high <= MOST_CPU:
            raise argparse.ArgumentTypeError(
                f"expected cores as a list such as 0,2-3, from 0 to {MOST_CPU}, got {text[:SHOWN]!r}"
            )
        found.update(range(low, high + 1))
    return frozenset(found)


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
