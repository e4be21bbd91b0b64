"""What the measuring commands share: their flags, a warm engine, and the document that they write."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels import output
from kernels.flags import path, thread_count
from kernels.progress import Progress
from models.commands.flags import names
from models.errors import InputError

if TYPE_CHECKING:
    from models.engine import Engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that all of them have."""
    parser.add_argument("model", metavar="DIR", help="a model directory, or the name of a bundled model")
    backends = ["eager", "compiled", "fused"]
    parser.add_argument(
        "--backends", type=names, default=backends, metavar="A,B", help=f"default: {','.join(backends)}"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--threads", type=thread_count, help="default: as many as PyTorch chooses")
    parser.add_argument("--json", type=path, metavar="FILE", help="also write the figures and their conditions here")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add the flag of those that measure in one dtype."""
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16; default: float32")


def warm_engine(options: argparse.Namespace, dtype: str, max_rows: int) -> "Engine":
    """Load the model and make every backend ready for up to `max_rows`.

    Raises:
        InputError: a file that was asked for cannot be written.
        BackendUnavailableError: a backend cannot run here.
    """
    from models.bench import require_available
    from models.engine import load_engine

    for name in ("json", "png", "trace"):
        require_file(name, getattr(options, name, None))
    with Progress("loading") as progress:
        engine = load_engine(options.model, options.device, dtype, options.backends, options.threads, progress)
    require_available(engine)
    with Progress("warming up", patience_s=0 if "compiled" in options.backends else 2) as progress:
        engine.warm_up(max_rows, lambda name, done, total: progress(done, total, name))
    require_available(engine)
    return engine


def print_conditions(engine: "Engine", **changes: str | int) -> dict[str, Any]:
    """Print the conditions of what was measured, and return them, the model among them."""
    from models.conditions import conditions, described

    facts = conditions(engine.device, engine.dtype, engine.threads) | changes
    print(f"{engine.config.name}: {engine.config.size}")
    print(described(facts))
    return {**facts, "model": engine.config.to_dict()}


def write(file: Path | None, document: dict[str, Any]) -> None:
    """Write a document where a file was asked for."""
    if file is not None:
        output.write(file, json.dumps(document, indent=1) + "\n")


def require_file(name: str, file: Path | None) -> None:
    """Say before a long measurement, not after it, that the file for `name` cannot be written.

    Raises:
        InputError: that is so.
    """
    reason = None if file is None else output.no_file_reason(file)
    if reason is not None:
        raise InputError(f"{name}: {reason}")
