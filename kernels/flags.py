"""What every command line needs: errors in one line, and parsers of counts, paths and lists."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

T = TypeVar("T")

MOST_THREADS = 1024  # far more are refused by the system, which ends the process


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def positive(text: str) -> int:
    """Parse a positive integer."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return int(text)


def thread_count(text: str) -> int:
    """Parse a count of CPU threads."""
    count = positive(text)
    if count > MOST_THREADS:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_THREADS:,} threads, got {count:,}")
    return count


def path(text: str) -> Path:
    """Parse a path; an empty one, which would mean the current directory, is refused."""
    if not text:
        raise argparse.ArgumentTypeError(f"expected a path, got {text!r}")
    return Path(text)


def listed(parse: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Make a parser of what `parse` takes, with commas between; what comes twice is kept once."""

    def parse_all(text: str) -> list[T]:
        return list(dict.fromkeys(parse(each.strip()) for each in text.split(",")))

    return parse_all
