"""The digits model is trained anew."""

from pathlib import Path

import pytest

from models import weights
from models.__main__ import main
from models.config import ModelConfig


def test_train_writes_a_model_and_says_how_well_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "m"), "--epochs", "2"]) == 0
    weights.check(tmp_path / "m", ModelConfig.load(tmp_path / "m"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("training images 1438, accuracy ")
    assert lines[2].startswith("test images     359, accuracy ")
