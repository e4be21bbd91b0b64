"""What a model is, for people and as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models import weights
from models.__main__ import main
from models.config import ModelConfig
from models.directory import ZOO

NEW = ("--dim", "8", "--hidden", "12", "--depth", "2")


def test_inspect_shows_what_a_model_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "digits", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    config = ModelConfig.load(ZOO / "digits")
    assert ModelConfig.from_dict(facts["config"]) == config
    assert facts["parameters"] == config.parameter_count
    assert facts["flops_per_row"] == config.flops_per_row
    assert facts["weights_bytes"] == (ZOO / "digits" / weights.WEIGHTS_FILE).stat().st_size
    assert facts["weights_types"] == ["F32"]
    assert facts["tensors"]["stem.weight"] == [64, 64]
    assert main(["inspect", "digits"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "hidden         192",
        f"{config.parameter_count:,}",
        f"{config.flops_per_row:,}",
        " bytes, F32\n",
        "head.bias  10",
    ):
        assert expected in text


def test_inspect_of_a_model_without_weights_says_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["new", str(tmp_path / "m"), *NEW])
    assert main(["inspect", str(tmp_path / "m")]) == 0
    assert "none, seeded random numbers" in capsys.readouterr().out


def test_what_cannot_be_shown_is_escaped(tmp_path: Path) -> None:
    directory = tmp_path / os.fsdecode(b"\xff")
    main(["new", str(directory), *NEW, "--name", "odd", "--out-features", "1"])
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"labels": ["\u00e4"]}))
    command = [sys.executable, "-m", "models", "inspect", str(directory)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert r'["\xe4"]' in done.stdout
