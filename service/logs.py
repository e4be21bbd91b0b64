"""What the server's processes write to stderr: how far a start is, warnings, faults, and requests if asked."""

import io
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TextIO

from pythonjsonlogger.orjson import OrjsonFormatter

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

REQUESTS = logging.getLogger("service.requests")
START = logging.getLogger("service.start")
TEXT = "{asctime} {levelname} {name}: {message}"
JSON_NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}


class JSONFormatter(OrjsonFormatter):
    """One object a line, with its time in UTC."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """Return the record's time as ISO 8601 has it, with the zone."""
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class DroppingFile(io.FileIO):
    """A file that leaves out what it cannot write: its disk is full, its pipe is too, or nobody reads that any more."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write what can be written now, and take the rest for written where that fails."""
        size = memoryview(data).nbytes
        try:
            written: int | None = super().write(data)
        except OSError:
            return size
        return size if written is None else written


def open_stderr() -> None:
    """Let nothing in this process fail for a line that cannot be written: who calls the server is served all the same.

    A standard stream that is closed is opened on nothing, here and for the processes that this one starts: a file or a
    socket that gets its number is sent whatever libraries write to stderr.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
    file = io.BufferedWriter(DroppingFile(2, "w", closefd=False))
    encoding = sys.stderr.encoding if sys.stderr else "utf-8"  # None where it was closed
    sys.stderr = io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True)


class LogStream(io.TextIOBase):
    """A stream of which every line becomes one of the log, once it is whole: `print` writes a line's end by itself."""

    def __init__(self) -> None:
        self._begun = ""

    def write(self, text: str) -> int:
        """Log the lines that are whole by now."""
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            START.info(line)
        return len(text)


def configure(style: str, is_request_logged: bool) -> None:
    """Set the form of every log line of this process, the host framework's included.

    Args:
        style: "text", or "json" for one object a line.
        is_request_logged: whether each inference request leaves a line.
    """
    formatter = (
        JSONFormatter("{asctime}{levelname}{name}{message}", style="{", rename_fields=JSON_NAMES)
        if style == "json"
        else logging.Formatter(TEXT, style="{")
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name in ("litserve", "uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    REQUESTS.setLevel(logging.INFO if is_request_logged else logging.WARNING)
    START.setLevel(logging.INFO)
    logging.captureWarnings(style == "json")


def start_stream() -> TextIO:
    """Return where a process tells how far its start is: stderr, or the log where that has a form for programs."""
    return LogStream() if _is_json() else sys.stderr  # type: ignore[return-value]


def tell_error(message: str) -> None:
    """Write the one line that says why the server, or a worker of it, ends."""
    if _is_json():
        START.error(message)
    else:
        print(f"error: {message}", file=sys.stderr, flush=True)


def _is_json() -> bool:
    return any(isinstance(handler.formatter, JSONFormatter) for handler in logging.getLogger().handlers)


def is_request_logged() -> bool:
    """Say whether requests leave lines."""
    return REQUESTS.isEnabledFor(logging.INFO)


def log_request(**fields: object) -> None:
    """Write one line of an inference request, its fields by name."""
    REQUESTS.info(" ".join(f"{name}={value}" for name, value in fields.items()), extra=fields)
