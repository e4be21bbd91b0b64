"""A command line, as it is typed."""

from collections.abc import Callable, Sequence

import pytest


def refused(main: Callable[[Sequence[str]], int], capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a program whose command fails, and return its one line."""
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = int(str(stop.code))
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err.strip()
