"""Parsers of the values of flags, which say what they expected and got."""

import argparse
import math


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
