"""Finds a model directory by the name of a bundled model or by its path."""

import os
from pathlib import Path

from models.config import CONFIG_FILE, nearest
from models.errors import ConfigError

ZOO = Path(__file__).parent / "zoo"


def names() -> tuple[str, ...]:
    """Return the names of the bundled models."""
    return tuple(sorted(path.parent.name for path in ZOO.glob(f"*/{CONFIG_FILE}")))


def resolve(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the model directory that `name_or_path` stands for.

    A bare word that names a bundled model is that model; write ``./word`` for a directory of the same name.

    Raises:
        ConfigError: it is neither a bundled model nor a directory.
    """
    text = os.fspath(name_or_path)
    if text in names():
        return ZOO / text
    path = Path(text)
    if text and path.is_dir():
        return path
    found = "a file" if text and path.exists() else "neither"
    raise ConfigError(
        f"model: expected a directory or one of the bundled models {', '.join(names())}, got {text!r}, which is "
        f"{found}{nearest(text, names())}"
    )
