"""Parsers of the values of flags, which say what they expected and got."""

import argparse
import math

from kernels.flags import listed, positive

names = listed(str)
row_counts = listed(positive)


def finite(text: str) -> float:
    """Parse a number that is neither infinite nor NaN."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number, got {text!r}")
    return value
