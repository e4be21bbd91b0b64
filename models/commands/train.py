"""Trains the demo model on scikit-learn's handwritten digits and writes its directory."""

import argparse

from kernels.progress import Progress
from models.commands import model_directory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.description = __doc__
    model_directory.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and batches; default: %(default)s")
    parser.add_argument("--epochs", type=int, default=60, help="default: %(default)s")


def run(options: argparse.Namespace) -> None:
    """Train it, and say how well it reads."""
    import torch

    from models import digits
    from models.mlp import MLP

    model_directory.refuse_a_model(options)
    split = digits.load_split()
    with Progress("training") as progress:
        tensors = digits.train(
            split, options.seed, options.epochs, lambda done, total, loss: progress(done, total, f"loss {loss:.3f}")
        )
    model = MLP(digits.CONFIG)
    model.load_state_dict(tensors)
    with torch.inference_mode():
        shares = [
            digits.accuracy(model(rows), labels)
            for rows, labels in ((split.train_rows, split.train_labels), (split.test_rows, split.test_labels))
        ]
    model_directory.write(options, digits.CONFIG, tensors)
    print(f"training images {len(split.train_rows)}, accuracy {shares[0]:.2%}")
    print(f"test images     {len(split.test_rows)}, accuracy {shares[1]:.2%} (split by seed {digits.SPLIT_SEED})")
