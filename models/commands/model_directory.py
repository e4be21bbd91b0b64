"""The directory that a command writes a model to; an existing model is replaced only if asked."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.flags import path
from kernels.output import no_directory_reason
from models import weights
from models.config import CONFIG_FILE, ModelConfig
from models.errors import ModelError
from models.weights import WEIGHTS_FILE

if TYPE_CHECKING:
    from torch import Tensor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add OUT and --overwrite."""
    parser.add_argument("out", type=path, metavar="OUT", help="the new directory")
    parser.add_argument("--overwrite", action="store_true", help="replace the model that OUT holds")


def add_name(parser: argparse.ArgumentParser) -> None:
    """Add --name, which `name` reads."""
    parser.add_argument("--name", help="default: the directory's name")


def name(options: argparse.Namespace) -> str:
    """Return the new model's name."""
    return str(options.out.resolve().name if options.name is None else options.name)


def refuse_a_model(options: argparse.Namespace) -> None:
    """Do nothing where the directory may be written.

    Raises:
        ModelError: it is none or cannot be written, or it holds a model, and --overwrite was not given.
    """
    reason = no_directory_reason(options.out)
    if reason is not None:
        raise ModelError(f"OUT: {reason}")
    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not options.overwrite and (options.out / file).exists():
            raise ModelError(
                f"{options.out}: expected a directory without a model, got one with {file}; name another one, or add "
                "--overwrite"
            )


def write(options: argparse.Namespace, config: ModelConfig, tensors: "dict[str, Tensor] | None") -> None:
    """Write the directory, and say how large its model is; None for weights that only their seed tells.

    Raises:
        ModelError: as `refuse_a_model`.
    """
    refuse_a_model(options)
    out: Path = options.out
    with directory(out):
        if tensors is None:
            (out / WEIGHTS_FILE).unlink(missing_ok=True)
        else:
            weights.save(out, tensors)
        config.save(out)
    print(f"{out}: {config.size}")


@contextmanager
def directory(out: Path) -> Iterator[None]:
    """Make a directory for a model; where what is inside fails, the directories made are taken away again."""
    made = [it for it in (out, *out.parents) if not it.exists()]
    out.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if made:
            for file in (WEIGHTS_FILE, CONFIG_FILE):
                (out / file).unlink(missing_ok=True)
        for each in made:
            with suppress(OSError):  # not empty: somebody else has put something there
                each.rmdir()
        raise
