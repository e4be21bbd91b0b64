"""The demo model: handwritten digits, 8 by 8 pixels, from scikit-learn's bundled data.

Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49; scikit-learn bundles its test half, 1,797 images.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from models import weights
from models.config import FFNConfig, InitConfig, ModelConfig, NormConfig
from models.errors import InputError, ModelError
from models.mlp import MLP

CONFIG = ModelConfig(
    name="digits",
    in_features=64,
    out_features=10,
    dim=64,
    hidden=192,
    depth=2,
    ffn=FFNConfig(gated=True, activation="silu"),
    norm=NormConfig(kind="rms"),
    labels=tuple("0123456789"),
)
SPLIT_SEED = 0
TEST_SHARE = 0.2
MAX_PIXEL = 16.0


@dataclass(frozen=True, slots=True)
class Split:
    """The images, divided once and for all.

    Attributes:
        train_rows: (1438, 64) pixel values 0 to 16, row by row of the image, float32.
        train_labels: (1438,) digits, int64.
        test_rows: (359, 64).
        test_labels: (359,).
    """

    train_rows: Tensor
    train_labels: Tensor
    test_rows: Tensor
    test_labels: Tensor


def load_split() -> Split:
    """Read the images and divide them: a fifth, chosen by a fixed seed, is kept for the test.

    Raises:
        ModelError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ModelError(
            "digits: expected scikit-learn, which brings the images, and it is not installed; run: pip install "
            "scikit-learn"
        ) from None
    pixels, digits = load_digits(return_X_y=True)
    rows, labels = torch.from_numpy(pixels).float(), torch.from_numpy(digits).long()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SPLIT_SEED))
    test_count = round(TEST_SHARE * len(rows))
    test, train = order[:test_count], order[test_count:]
    return Split(rows[train], labels[train], rows[test], labels[test])


def train(
    split: Split, seed: int = 0, epochs: int = 60, progress: Callable[[int, int, float], None] | None = None
) -> dict[str, Tensor]:
    """Fit the demo model to the training rows; the test rows are not looked at.

    Every image is shifted by up to a pixel in each direction, anew in each epoch. The pixels' scale goes into the stem,
    so that the model takes them unscaled.

    Args:
        split: the images.
        seed: of the weights, the order and the moves; the same seed gives the same weights on one machine, since one
            thread does the sums, in one order.
        epochs: passes over the training rows.
        progress: told how many epochs of how many are done, and the last one's mean loss.

    Returns:
        The weights, float32, by their names in the file.

    Raises:
        InputError: `epochs` is not positive.
        ModelError: the loss is no longer finite.
    """
    if epochs < 1:
        raise InputError(f"epochs: expected a positive integer, got {epochs}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _fit(split, seed, epochs, progress)
    finally:
        torch.set_num_threads(threads)


def _fit(split: Split, seed: int, epochs: int, progress: Callable[[int, int, float], None] | None) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = MLP(CONFIG)
    model.load_state_dict(weights.seeded(replace(CONFIG, init=InitConfig(seed))))
    batch = 64
    steps = epochs * -(-len(split.train_rows) // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    images = (split.train_rows / MAX_PIXEL).view(-1, 8, 8)
    for epoch in range(1, epochs + 1):
        losses: list[float] = []
        order = torch.randperm(len(images), generator=generator)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            logits = model(moved(images[chosen], generator).flatten(1))  # (N, 10)
            loss = F.cross_entropy(logits, split.train_labels[chosen], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        mean = sum(losses) / len(losses)
        if not mean < float("inf"):
            raise ModelError(f"digits: the loss became {mean} in epoch {epoch}; train with another seed")
        if progress is not None:
            progress(epoch, epochs, mean)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    tensors["stem.weight"] /= MAX_PIXEL
    return tensors


def moved(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift each of (N, 8, 8) by -1, 0 or 1 pixel in each direction; what leaves is lost, what is vacated is 0."""
    padded = F.pad(images, (1, 1, 1, 1))  # (N, 10, 10)
    shift = torch.randint(0, 3, (len(images), 2, 1), generator=generator)
    places = torch.arange(8) + shift  # (N, 2, 8)
    image = torch.arange(len(images))[:, None, None]
    return padded[image, places[:, 0, :, None], places[:, 1, None, :]]


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Return the share of rows whose largest logit is the label's."""
    return cast("float", (logits.argmax(-1) == labels).double().mean().item())
