"""What a command leaves: checks before the work that its files and directories can be written, rounds and writes."""

import os
from pathlib import Path


def no_file_reason(path: Path) -> str | None:
    """Say in one sentence, without a full stop, why no file can be written there; None where one can."""
    if path.is_dir():
        return f"expected a file to write, got {path}, which is a directory"
    if not path.parent.is_dir():
        return f"expected a directory to write {path.name} to, got {path.parent}, which is none: make it"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"expected a file that may be written, got {path}, which may not"
    return None


def no_directory_reason(path: Path) -> str | None:
    """Say in one sentence, without a full stop, why no files can be written to that directory; None where they can.

    It need not be there yet, nor those around it.
    """
    place = next(it for it in (path, *path.absolute().parents) if it.exists())
    if not place.is_dir():
        return f"expected a directory to write to, got {path}, " + (
            "which is a file" if place == path else f"and {place} is a file"
        )
    if not os.access(place, os.W_OK):
        return f"expected a directory that may be written to, got {path}, which may not"
    return None


def four_digits(value: float) -> float:
    """Round a figure to four significant digits: no measurement here is more precise."""
    return float(f"{value:.4g}")


def write(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        OSError: it cannot be written; the error names it, where a full disk's own one does not.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
