"""Flags of the command line: errors in one line, and parsers of values, which say what they expected and got."""

import argparse
import math
from typing import NoReturn


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


def row_counts(text: str) -> list[int]:
    """Parse positive integers with commas between; each is kept once."""
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"expected positive integers with commas between, got {text!r}")
    return list(dict.fromkeys(counts))


def finite(text: str) -> float:
    """Parse a number that is neither infinite nor NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return value


def names(text: str) -> list[str]:
    """Parse names with commas between."""
    return [part.strip() for part in text.split(",")]
