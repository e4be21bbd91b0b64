"""A new model directory says what was asked for."""

import errno
from pathlib import Path

import pytest
import torch

from models import weights
from models.__main__ import main
from models.config import ModelConfig
from tests.command_line import refused

NEW = ("--dim", "8", "--hidden", "12", "--depth", "2")


def test_new_writes_a_config_that_says_what_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "mine"
    assert main(["new", str(out), *NEW, "--activation", "silu", "--no-gated", "--bias", "--norm", "layer", "--position", "both", "--eps", "1e-5", "--in-features", "3", "--out-features", "4", "--seed", "9"]) == 0  # fmt: skip  # noqa: E501
    config = ModelConfig.load(out)
    assert config.to_dict() == {
        "name": "mine", "in_features": 3, "out_features": 4, "dim": 8, "hidden": 12, "depth": 2,
        "ffn": {"gated": False, "activation": "silu", "bias": True},
        "norm": {"kind": "layer", "position": "both", "eps": 1e-5}, "labels": None, "init": {"seed": 9},
    }  # fmt: skip
    assert [path.name for path in out.iterdir()] == ["config.json"]
    assert f"{config.parameter_count:,} parameters" in capsys.readouterr().out


def test_new_with_weights_writes_the_numbers_of_the_seed(tmp_path: Path) -> None:
    assert main(["new", str(tmp_path / "m"), *NEW, "--name", "other", "--weights"]) == 0
    config = ModelConfig.load(tmp_path / "m")
    assert config.name == "other"
    loaded = weights.load(tmp_path / "m", config, torch.float32)
    assert weights.has_weights(tmp_path / "m", config)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.seeded(config).items())


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("swiglu", "; SwiGLU is --activation silu --gated"),
        ("GEGLU", "; GEGLU is --activation gelu_tanh --gated"),
        ("tanh", ""),
    ],
)
def test_a_gated_network_asked_for_by_its_name_is_told_how(
    capsys: pytest.CaptureFixture[str], name: str, advice: str
) -> None:
    sentence = refused(main, capsys, "new", "x", *NEW, "--activation", name)
    assert f"expected one of gelu, gelu_tanh, silu, relu, got {name!r}{advice} (see " in sentence


def test_the_help_of_new_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["new", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    told = ("gelu_tanh", "rms", "pre", "1e-06", "0", "--gated", "--no-bias")
    assert [value for value in told if f"default: {value}" not in out] == []
    assert "SwiGLU is --activation silu --gated" in out


def test_a_model_is_not_replaced_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "m")
    assert main(["new", out, *NEW, "--weights"]) == 0
    capsys.readouterr()
    assert "expected a directory without a model, got one with config.json" in refused(main, capsys, "new", out, *NEW)
    assert main(["new", out, *NEW, "--overwrite", "--seed", "1"]) == 0
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]  # the old numbers are gone too


def test_a_config_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: ModelConfig, directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(directory))

    monkeypatch.setattr(ModelConfig, "save", full)
    assert "No space left" in refused(main, capsys, "new", str(tmp_path / "a" / "b"), *NEW)
    assert list(tmp_path.iterdir()) == []
