"""Shows what a model directory holds."""

import argparse
import json

from models import weights
from models.config import ModelConfig
from models.directory import resolve
from models.weights import WEIGHTS_FILE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = __doc__
    parser.add_argument("model", metavar="DIR", help="a model directory, or the name of a bundled model")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace) -> None:
    """Show it."""
    directory = resolve(options.model)
    config = ModelConfig.load(directory)
    weights.check(directory, config)
    has_file = weights.has_weights(directory, config)
    size = (directory / WEIGHTS_FILE).stat().st_size if has_file else 0
    types = weights.stored_types(directory) if has_file else ()
    facts = {
        "directory": str(directory),
        "config": config.to_dict(),
        "parameters": config.parameter_count,
        "weights_bytes": size,
        "weights_types": types,
        "flops_per_row": config.flops_per_row,
        "tensors": {name: list(shape) for name, shape in config.shapes().items()},
    }
    if options.json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    print(f"directory      {directory}")
    for key, value in config.to_dict().items():
        print(f"{key:14} {json.dumps(value, ensure_ascii=False)}")
    print(f"parameters     {config.parameter_count:,}")
    kept = f"{size:,} bytes, {' and '.join(types)}" if has_file else "none, seeded random numbers"
    print(f"weights file   {kept}")
    print(f"FLOPs a row    {config.flops_per_row:,}")
    print("tensors")
    for name, shape in config.shapes().items():
        print(f"  {name}  {' x '.join(map(str, shape))}")
