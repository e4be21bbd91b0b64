"""Where a measurement writes: checked before anything is measured, and reserved for one writer."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtests.errors import LoadTestError

LOCK = ".writing"


class OutputError(LoadTestError):
    """What should be written cannot be."""


def require_directory(flag: str, path: Path) -> None:
    """Check that the directory to write to exists or can be made, without making it.

    Raises:
        OutputError: it cannot.
    """
    try:
        there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "cannot be written to" if there.is_dir() else "is no directory"
            raise OutputError(f"{flag} {path}: expected a directory that can be written to: {there} {why}")
    except OSError as error:  # a name that is too long, or goes in circles
        raise OutputError(f"{flag} {path}: expected a directory that can be written to: {error.strerror}") from error


def require_file(flag: str, path: Path) -> None:
    """Check that a file can be written or replaced; a device or a pipe is refused, since it would be replaced.

    Raises:
        OutputError: it cannot.
    """
    try:
        if not path.parent.is_dir():
            raise OutputError(f"{flag} {path}: there is no directory {path.parent}")
        if path.exists() and not path.is_file():
            raise OutputError(f"{flag} {path}: expected a file, which is replaced, got something else of that name")
    except OSError as error:
        raise OutputError(f"{flag} {path}: expected a file that can be written: {error.strerror}") from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{flag} {path}: {path.parent} cannot be written to")


@contextmanager
def sole_writer(flag: str, path: Path) -> Iterator[None]:
    """Make the directory, and keep others from writing to it at the same time.

    Raises:
        OutputError: it cannot be made or written to, or somebody else writes there.
    """
    lock = path / LOCK
    try:
        path.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    except OSError as error:
        told = f"{flag} {path}: expected a directory that can be written to: {error.strerror}"
        raise OutputError(told) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            told = f"{flag} {path}: another measurement is writing there; give this one another directory"
            raise OutputError(told) from error
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
