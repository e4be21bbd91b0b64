"""What the server's processes write to stderr beside their start screen: warnings, faults, and requests if asked."""

import logging
import sys

from pythonjsonlogger.orjson import OrjsonFormatter

REQUESTS = logging.getLogger("service.requests")
TEXT = "{asctime} {levelname} {name}: {message}"
JSON_NAMES = {"asctime": "time", "levelname": "level", "name": "logger"}


def configure(style: str, is_request_logged: bool) -> None:
    """Set the form of every log line of this process, the host framework's included.

    Args:
        style: "text", or "json" for one object a line.
        is_request_logged: whether each inference request leaves a line.
    """
    formatter = (
        OrjsonFormatter("{asctime}{levelname}{name}{message}", style="{", rename_fields=JSON_NAMES)
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


def is_request_logged() -> bool:
    """Say whether requests leave lines."""
    return REQUESTS.isEnabledFor(logging.INFO)


def log_request(**fields: object) -> None:
    """Write one line of an inference request, its fields by name."""
    REQUESTS.info(" ".join(f"{name}={value}" for name, value in fields.items()), extra=fields)
