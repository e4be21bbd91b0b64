"""Turns the feed-forward blocks of a Hugging Face model directory into a model directory."""

import argparse
from pathlib import Path

from kernels.progress import Progress
from models import output, weights
from models.architectures import ARCHITECTURES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = f"{__doc__} A model_type is one of {', '.join(ARCHITECTURES)}."
    parser.add_argument("source", type=Path, metavar="SRC", help="directory with config.json and model.safetensors")
    output.add_arguments(parser)
    output.add_name(parser)
    parser.add_argument("--layers", type=layers, default=(None, None), metavar="A:B", help="A included, B not")


def run(options: argparse.Namespace) -> None:
    """Import it, one tensor at a time."""
    from models.importers import Checkpoint

    output.refuse_a_model(options)
    checkpoint = Checkpoint(options.source, output.name(options), options.layers)
    with output.directory(options.out), Progress(f"reading {options.source}") as progress:
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
