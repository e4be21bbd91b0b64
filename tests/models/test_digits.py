"""The demo model: what it is trained on, how well it reads, and that it can be made again."""

import sys

import pytest
import torch

from models import digits, weights
from models.config import ModelConfig
from models.directory import ZOO
from models.engine import load_engine
from models.errors import InputError, ModelError
from models.mlp import MLP


@pytest.fixture(scope="module")
def split() -> digits.Split:
    return digits.load_split()


def test_the_split_is_fixed_and_its_halves_are_apart(split: digits.Split) -> None:
    again = digits.load_split()
    assert torch.equal(split.test_rows, again.test_rows)
    assert (split.train_rows.shape, split.test_rows.shape) == ((1438, 64), (359, 64))
    assert (split.train_labels.shape, split.test_labels.shape) == ((1438,), (359,))
    train = {tuple(row) for row in split.train_rows.tolist()}
    assert not any(tuple(row) in train for row in split.test_rows.tolist())


def test_rows_are_the_pixel_values_as_given(split: digits.Split) -> None:
    assert split.train_rows.min() == 0
    assert split.train_rows.max() == 16
    assert set(split.train_labels.tolist()) == set(range(10))


@pytest.mark.parametrize("backend", ["eager", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_model_reads_the_test_rows(split: digits.Split, backend: str, dtype: str) -> None:
    engine = load_engine("digits", dtype=dtype)
    assert digits.accuracy(engine.run(split.test_rows, backend), split.test_labels) >= 0.97


def test_the_bundled_model_is_the_one_the_code_describes_and_is_small() -> None:
    config = ModelConfig.load(ZOO / "digits")
    assert config == digits.CONFIG
    assert config.labels == ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    assert (ZOO / "digits" / weights.WEIGHTS_FILE).stat().st_size < 4 * 10**6


def test_training_gives_the_same_weights_again(split: digits.Split) -> None:
    first, second = (digits.train(split, seed=3, epochs=1) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert list(first) == list(digits.CONFIG.shapes())
    assert not torch.equal(first["stem.weight"], digits.train(split, seed=4, epochs=1)["stem.weight"])


@pytest.mark.slow
def test_training_reaches_the_accuracy_that_is_asked_of_it(split: digits.Split) -> None:
    losses: list[float] = []
    tensors = digits.train(split, seed=1, epochs=20, progress=lambda *step: losses.append(step[2]))
    model = MLP(digits.CONFIG)
    model.load_state_dict(tensors)
    with torch.inference_mode():
        assert digits.accuracy(model(split.test_rows), split.test_labels) >= 0.97
    assert len(losses) == 20
    assert losses[-1] < losses[0]


def test_images_move_by_a_pixel_at_most_and_lose_what_leaves() -> None:
    image = torch.arange(1.0, 65).view(1, 8, 8)
    padded = torch.nn.functional.pad(image[0], (1, 1, 1, 1))
    windows = [padded[y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    results = digits.moved(image.expand(200, 8, 8), torch.Generator().manual_seed(0))
    places = [next(i for i, window in enumerate(windows) if torch.equal(window, result)) for result in results]
    assert set(places) == set(range(9))


def test_a_loss_that_is_not_finite_stops_the_training(split: digits.Split) -> None:
    broken = digits.Split(split.train_rows * float("nan"), split.train_labels, split.test_rows, split.test_labels)
    with pytest.raises(ModelError, match="the loss became nan in epoch 1"):
        digits.train(broken)


def test_zero_epochs_are_refused(split: digits.Split) -> None:
    with pytest.raises(InputError, match="epochs: expected a positive integer, got 0"):
        digits.train(split, epochs=0)


def test_without_scikit_learn_the_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModelError, match="pip install scikit-learn"):
        digits.load_split()
