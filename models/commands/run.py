"""Runs rows through a model and writes what comes out."""

import argparse
import io
import json
import math
import sys
import tokenize
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels import output
from kernels.flags import path, thread_count
from kernels.progress import Progress
from models.commands.measuring import require_file
from models.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = __doc__
    parser.add_argument("model", metavar="DIR", help="a model directory, or the name of a bundled model")
    parser.add_argument("--backend", default="eager", help="eager, compiled or fused; default: eager")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16; default: float32")
    parser.add_argument("--threads", type=thread_count, help="default: as many as PyTorch chooses")
    parser.add_argument("--input", type=path, metavar="FILE", help=".npy or JSON; default: JSON from stdin")
    parser.add_argument("--output", type=path, metavar="FILE", help=".npy, else JSON; default: JSON to stdout")


def run(options: argparse.Namespace) -> None:
    """Run them."""
    from models.engine import load_engine

    require_file("output", options.output)
    rows = read_rows(options.input)
    with Progress("loading") as progress:
        engine = load_engine(
            options.model, options.device, options.dtype, (options.backend,), options.threads, progress
        )
    if options.backend == "compiled":
        with Progress("compiling", patience_s=0) as progress:
            engine.warm_up(1, lambda _, done, total: progress(done, total))
    result = engine.run(rows, options.backend).float().cpu().numpy()
    if options.output is None:
        print(to_json(result))
    elif options.output.suffix == ".npy":
        np.save(options.output, result)
    else:
        output.write(options.output, to_json(result) + "\n")


def read_rows(path: Path | None) -> "Tensor":
    """Read a .npy file, a JSON file, or JSON from stdin.

    Raises:
        InputError: it is not a regular file but, say, a pipe, which may have no end; or it holds anything but numbers
            in rows of one length, or less than its head claims.
        OSError: there is no such file, or it cannot be read.
    """
    import torch

    if path is not None and not S_ISREG(path.stat().st_mode):
        raise InputError(f"{path}: expected a regular file; hand what comes from elsewhere to stdin, without --input")
    name = "stdin" if path is None else str(path)
    data = sys.stdin.buffer.read() if path is None else path.read_bytes()
    try:
        if data.startswith(b"\x93NUMPY"):
            require_whole(name, data)
            values = np.load(io.BytesIO(data), allow_pickle=False)
        else:
            values = np.array(json.loads(data))
    except (ValueError, TypeError, RecursionError, EOFError, SyntaxError, tokenize.TokenError):
        raise InputError(
            f"{name}: expected an .npy array or a JSON list of numbers, every row as long as the others"
        ) from None
    if values.dtype.kind not in "fiu":
        raise InputError(f"{name}: expected numbers, got an array of {values.dtype}")
    return torch.from_numpy(values.astype(np.float64))


def require_whole(name: str, data: bytes) -> None:
    """Compare what the head of an .npy file claims with what follows it, before memory is taken for it.

    Raises:
        InputError: it claims more, or less.
        ValueError: it has no head, or one of a size that no array has.
    """
    stream = io.BytesIO(data)
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in headers:
        raise ValueError(version)
    shape, _, dtype = headers[version](stream)
    claimed, there = math.prod(shape) * dtype.itemsize, len(data) - stream.tell()
    if not dtype.hasobject and claimed != there:
        raise InputError(f"{name}: expected {claimed:,} bytes behind its head, as that claims, got {there:,}")
    if any(size > sys.maxsize for size in shape):  # beside one that is 0
        raise ValueError(shape)


def to_json(values: Any) -> str:
    """Return an array as JSON.

    Raises:
        InputError: it holds a number that JSON cannot.
    """
    if not np.isfinite(values).all():
        raise InputError("output: holds NaN or infinity, which JSON cannot: write it with --output FILE.npy")
    return json.dumps(values.tolist())
