"""What all processes of one generator have to agree on: their sources, and what makes their rows and arrivals."""

import hashlib
from functools import cache
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).parents[1]
PACKAGES = ("locust", "numpy")  # what carries the messages, and what draws from the seed


@cache
def generator_version() -> str:
    """Return the sources as a digest, with the versions of the packages."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.rglob("*.py")):
        digest.update(f"{path.relative_to(SOURCES)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return ", ".join([digest.hexdigest()[:12], *(f"{name} {version(name)}" for name in PACKAGES)])
