"""Models to test with: small, seeded, every parameter away from its neutral value."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import weights
from models.backends import paths
from models.config import ModelConfig
from tests.made_model import made_fields

FFN = {"gated": True, "activation": "gelu_tanh", "bias": True}
TINY = made_fields("tiny", dim=16, hidden=24, depth=2, in_features=5, out_features=3, ffn=FFN)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small products gain nothing from a second thread, and wait for it where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tiny_fields() -> Callable[..., dict[str, Any]]:
    """Return the fields of the small config with some changed; those of ffn and norm are named by themselves."""

    def fields(**changes: Any) -> dict[str, Any]:
        data = {**TINY, "ffn": dict(TINY["ffn"]), "norm": dict(TINY["norm"])}
        for key, value in changes.items():
            owner = next((group for group in ("ffn", "norm") if key in TINY[group]), None)
            (data if owner is None else data[owner])[key] = value
        return data

    return fields


@pytest.fixture
def tiny(tiny_fields: Callable[..., dict[str, Any]]) -> Callable[..., ModelConfig]:
    """Return the small config with some fields changed."""
    return lambda **changes: ModelConfig.from_dict(tiny_fields(**changes))


@pytest.fixture
def spread() -> Callable[[ModelConfig], dict[str, Tensor]]:
    """Return weights in which the norms scale and shift too, so that no tensor can be left out unnoticed."""

    def make(config: ModelConfig) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        tensors = weights.seeded(config)
        for name, tensor in tensors.items():
            if "norm" in name:
                tensor += 0.3 * torch.randn(tensor.shape, generator=generator)
        return tensors

    return make


@pytest.fixture
def write_model(tmp_path: Path, spread: Callable[[ModelConfig], dict[str, Tensor]]) -> Callable[[ModelConfig], Path]:
    """Write a model directory with weights and return its path."""

    def write(config: ModelConfig) -> Path:
        directory = tmp_path / f"model-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        config.save(directory)
        weights.save(directory, spread(config))
        return directory

    return write


@pytest.fixture
def paths_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file, yet to be written, in place of the measured paths of the hidden layer."""
    monkeypatch.setattr(paths, "FILE", tmp_path / "paths.json")
    paths.table.cache_clear()
    yield paths.FILE
    paths.table.cache_clear()
