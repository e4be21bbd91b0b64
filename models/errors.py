"""Every error this project raises on purpose, and whose fault each one is.

::

    MLPError
    ├── ModelError              the model directory is at fault
    │   ├── ConfigError         config.json: a field is missing, unknown, of the wrong type or out of range
    │   ├── WeightsError        model.safetensors: missing, foreign, truncated, or it does not fit the config
    │   └── ImportSourceError   a foreign checkpoint that cannot be turned into a model directory
    ├── BackendError            the engine was asked for what it does not have: a device, a dtype, a backend
    │   ├── UnknownBackendError       no backend of that name exists
    │   └── BackendUnavailableError   the backend exists and cannot run here; it says why, and which ones can
    ├── OutOfMemoryError        the rows are more than the device's memory has room for
    ├── DeviceLostError         the device fails every call of this process from now on; only a new process can use it
    └── InputError              the rows are at fault: their width, their dtype, their shape

Each message is one sentence: what was expected, what came, what to do.
"""

import json
from collections.abc import Iterable

MAX_NAME = 60  # characters


class MLPError(Exception):
    """The root: catch it to catch every error of this project and nothing else."""


class ModelError(MLPError):
    """The model directory is at fault."""


class ConfigError(ModelError):
    """config.json is missing, unreadable, or one of its fields is wrong."""


class WeightsError(ModelError):
    """model.safetensors is missing, unreadable, or does not fit the config."""


class ImportSourceError(ModelError):
    """A foreign checkpoint cannot be turned into a model directory."""


class BackendError(MLPError):
    """The engine was asked for a device, a dtype or a backend that it does not have."""


class UnknownBackendError(BackendError):
    """No backend has this name.

    Args:
        name: what was asked for.
        known: the names that exist here.
        field: where it was asked for.
    """

    def __init__(self, name: str, known: Iterable[str], field: str = "backend") -> None:
        self.name = name
        self.known = tuple(known)
        self.field = field
        super().__init__(self.name, self.known, field)  # the arguments, so that a pickled copy can be made again

    def __str__(self) -> str:
        return f"{self.field}: expected one of {', '.join(self.known)}, got {_quoted(self.name)}"


class BackendUnavailableError(BackendError):
    """The backend exists and cannot run here.

    Args:
        backend: what was asked for.
        reason: why it cannot run, in one sentence without a full stop.
        available: the names that can run.
    """

    def __init__(self, backend: str, reason: str, available: Iterable[str]) -> None:
        self.backend = backend
        self.reason = reason
        self.available = tuple(available)
        super().__init__(self.backend, self.reason, self.available)

    def __str__(self) -> str:
        others = ", ".join(self.available) or "none"
        return f"backend {self.backend!r} is unavailable: {self.reason}; available: {others}"


def _quoted(name: str) -> str:
    """Quote a caller's name, of a long one its beginning."""
    return repr(name) if len(name) <= MAX_NAME else f"{name[:MAX_NAME]!r}..."


class InputError(MLPError):
    """The rows do not fit the model."""


class OutOfMemoryError(MLPError):
    """So many rows do not fit the device's memory; fewer may.

    Args:
        rows: how many were asked for at once.
        device: which one has no room.
    """

    def __init__(self, rows: int, device: str) -> None:
        self.rows = rows
        self.device = device
        super().__init__(self.rows, self.device)

    def __str__(self) -> str:
        return f"{self.device} has not enough free memory for {self.rows} rows at once; send fewer, or try again later"


class DeviceLostError(MLPError):
    """A fault on the device has ended this process's use of it; only a new process can use it again.

    Args:
        device: which one.
        reason: what its last call failed with, in one sentence without a full stop.
    """

    def __init__(self, device: str, reason: str) -> None:
        self.device = device
        self.reason = reason
        super().__init__(self.device, self.reason)

    def __str__(self) -> str:
        return f"{self.device} fails every call of this process from now on: {self.reason}; start a new process"


def first_line(error: BaseException) -> str:
    """Return the type and the first line of `error`, with no traceback, cut to 200 characters."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


def shown(value: object) -> str:
    """Return `value` as its JSON, cut to a length that leaves the sentence readable."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):  # no JSON, or an integer too long to be written out
        text = f"a value of type {type(value).__name__}"
    if not text.isprintable():  # what would move a terminal's cursor, or turn the sentence round
        text = ascii(text)
    return text if len(text) <= 60 else text[:57] + "..."
