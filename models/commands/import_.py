"""Turns the feed-forward blocks of a Hugging Face model directory into a model directory."""

import argparse

from kernels.flags import path
from kernels.progress import Progress
from models import weights
from models.architectures import ARCHITECTURES
from models.commands import model_directory
from models.errors import ImportSourceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = f"{__doc__} A model_type is one of {', '.join(ARCHITECTURES)}."
    parser.add_argument("source", type=path, metavar="SRC", help="directory with config.json and model.safetensors")
    model_directory.add_arguments(parser)
    model_directory.add_name(parser)
    parser.add_argument(
        "--layers", type=layers, default=(None, None), metavar="A:B", help="A included, B not; default: all"
    )


def run(options: argparse.Namespace) -> None:
    """Import it, one tensor at a time.

    Raises:
        ImportSourceError: as `Checkpoint`, and where OUT is SRC, whose other layers would be lost.
    """
    from models.checkpoint import Checkpoint

    if options.out.exists() and options.source.exists() and options.out.samefile(options.source):
        raise ImportSourceError(
            f"{options.out}: expected another directory than the one to import from; name a new one"
        )
    model_directory.refuse_a_model(options)
    checkpoint = Checkpoint(options.source, model_directory.name(options), options.layers)
    with model_directory.directory(options.out), Progress(f"reading {options.source}") as progress:
        weights.stream(options.out, checkpoint.layout, checkpoint.tensors(progress))
        checkpoint.config.save(options.out)
    print(f"{options.out}: {checkpoint.config.size}")
    if checkpoint.note is not None:
        print(checkpoint.note)


def layers(text: str) -> tuple[int | None, int | None]:
    """Parse A:B, either of which may be left out."""
    try:
        start, stop = text.split(":")
        return (int(start) if start else None, int(stop) if stop else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected A:B, for example 2:5 or 4:, got {text!r}") from None
