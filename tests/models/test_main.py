"""What holds for every command: mistakes are one line, help ends well."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from models.__main__ import COMMANDS, main
from tests.command_line import refused

ROOT = Path(__file__).parents[2]
NOTHING_IF_ABSENT = ("--in-features", "--out-features", "--json", "--png", "--trace")  # what they say they do
NEW = ("--dim", "8", "--hidden", "12", "--depth", "2")


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_tells_what_holds_where_a_flag_is_not_given(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # so that no sentence is broken
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = capsys.readouterr().out
    silent = set()
    for line in re.findall(r"^ +(--\S.*(?:\n {20,}.*)?)", text, re.MULTILINE):
        flag = re.split("[, ]", line)[0]
        is_silent = f"[{flag} " in text and "default: " not in line  # without brackets it has to be given
        if is_silent and flag not in NOTHING_IF_ABSENT:
            silent.add(flag)
    assert silent == set()


@pytest.mark.parametrize(
    ("command", "option"),
    [("bench", "json"), ("batch-invariance", "json"), ("profile", "json"), ("profile", "png"), ("profile", "trace")],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    monkeypatch.setattr("models.engine.load_engine", lambda *_: pytest.fail("loaded"))
    monkeypatch.setattr("models.profile.require_matplotlib", lambda: None)
    sentence = refused(main, capsys, command, "digits", f"--{option}", str(tmp_path / "nodir" / "x"))
    assert sentence.endswith(
        f"{option}: expected a directory to write x to, got {tmp_path}/nodir, which is none: make it"
    )
    assert "which is a directory" in refused(main, capsys, command, "digits", f"--{option}", str(tmp_path))


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
        (("new", "OUT", *NEW, "--name", ""), 'name: expected up to 128 ASCII letters'),
        (("new", "", *NEW), "argument OUT: expected a path, got ''"),
        (("import", "", "OUT"), "argument SRC: expected a path, got ''"),
        (("import", "SRC", ""), "argument OUT: expected a path, got ''"),
        (("train", ""), "argument OUT: expected a path, got ''"),
        (("run", "digits", "--input", ""), "argument --input: expected a path, got ''"),
        (("run", "digits", "--output", ""), "argument --output: expected a path, got ''"),
        (("run", "digits", "--output", "none/x"), "output: expected a directory to write x to, got none, "),
        (("bench", "digits", "--json", ""), "argument --json: expected a path, got ''"),
        (("profile", "digits", "--trace", ""), "argument --trace: expected a path, got ''"),
        (("bench", "digits", "--threads", "99999999999999"), "expected at most 1,024 threads, got 99,999,999,999,999"),
        (("new", "/dev/null", *NEW), "OUT: expected a directory to write to, got /dev/null, which is a file"),
        (("train", "/dev/null/x"), "OUT: expected a directory to write to, got /dev/null/x, and /dev/null is a file"),
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
    line = refused(main, capsys, *arguments)
    assert line.startswith("python -m models")
    assert sentence in line
    assert list(tmp_path.iterdir()) == []


def test_every_command_has_help_that_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert f"python -m models {command}" in capsys.readouterr().out


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(model: str) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr("models.commands.inspect.resolve", interrupt)
    assert main(["inspect", "digits"]) == 130
    assert capsys.readouterr().err == "python -m models inspect: interrupted\n"


def test_a_package_that_is_not_installed_is_named_with_what_installs_it() -> None:
    hidden = (
        "import sys; sys.modules['safetensors'] = None; import models.__main__ as it; it.main(['inspect', 'digits'])"
    )
    done = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    sentence = "it needs safetensors, which is not installed here; run `make setup`, and take .venv/bin/python"
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1
