"""Measures how batch-invariant results are: each row alone against the same row in batches, and against float64."""

import argparse

from kernels.progress import Progress
from models.commands import measuring
from models.commands.flags import names, row_counts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = __doc__
    measuring.add_arguments(parser)
    parser.add_argument(
        "--dtype", type=names, default=["float32", "bfloat16"], metavar="A,B", help="default: float32,bfloat16"
    )
    parser.add_argument(
        "--rows",
        type=row_counts,
        default=[2, 3, 16, 64, 256],
        metavar="N,N",
        help="rows of a batch; default: 2,3,16,64,256",
    )


def run(options: argparse.Namespace) -> None:
    """Compare them."""
    import torch

    from models import batch_invariance

    options.threads = options.threads or torch.get_num_threads()  # now: an engine sets it
    found = []
    for dtype in options.dtype:
        engine = measuring.warm_engine(options, dtype, max(options.rows))
        with Progress(f"comparing in {dtype}") as progress:
            found += batch_invariance.measure(engine, options.rows, progress)
    conditions = measuring.print_conditions(engine, dtype=", ".join(options.dtype))
    print(batch_invariance.table(found))
    measuring.write(options.json, {"conditions": conditions, "batch_invariance": [it.to_dict() for it in found]})
