"""The command line of models, as it is typed."""

import pytest

from models.__main__ import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that fails, and return its one line."""
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = int(str(stop.code))
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err.strip()
