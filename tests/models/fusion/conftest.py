"""Blocks to fuse, and Triton's kernels to fuse them with."""

import pytest
import torch
from torch import nn

from models.fusion.layers import LAYERS, OnCUDA
from tests.models.fusion import made_blocks
from tests.models.fusion.made_blocks import made


@pytest.fixture(params=["LlamaMLP", "BertIntermediate and BertOutput"])
def block(request: pytest.FixtureRequest) -> nn.Module:
    return made(request.param)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Triton's kernels, interpreted, on what is on the CPU, and small."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    monkeypatch.setitem(LAYERS, "cpu", OnCUDA)
    monkeypatch.setattr(OnCUDA, "unavailable_reason", lambda _: None)
    for name, size in {"DIM": 40, "HIDDEN": 72}.items():
        monkeypatch.setattr(made_blocks, name, size)
