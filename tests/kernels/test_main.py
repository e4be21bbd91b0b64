"""What holds for every command of the kernels: a mistake is one line, told before any work."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels import bench
from kernels.__main__ import main
from tests.command_line import refused

WIDTHS = ("--widths", "4x4", "--rows", "1")
COMMANDS = ("check", "aot", "roof", "bench", "tune")


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command prints when it is asked for help, no line of it wrapped."""
    monkeypatch.setenv("COLUMNS", "1000")

    def show(*arguments: str) -> str:
        with pytest.raises(SystemExit, match=r"^0$"):
            main([*arguments, "--help"])
        return capsys.readouterr().out

    return show


def test_the_help_names_every_command(help_of: Callable[..., str]) -> None:
    assert tuple(re.findall(r"^    (\w+) ", help_of(), re.MULTILINE)) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_tells_what_holds_where_a_value_is_not_given(command: str, help_of: Callable[..., str]) -> None:
    text = help_of(command)
    flags = re.findall(r"^  (--\S+) \S+\s+(\S.*)$", text, re.MULTILINE)
    assert flags
    for flag, told in flags:
        is_required = f"[{flag} " not in text
        assert is_required or re.search("default: |if not given|^write ", told), (flag, told)


def test_what_a_list_names_twice_is_measured_once(
    small_roof: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "cache_flush", lambda _: lambda: None)
    file = tmp_path / "a.json"
    shapes = ("--rows", "2,1,2", "--widths", "8x4,8x4")
    assert main(["bench", "--device", "cpu", *shapes, "--repetitions", "1", "--json", str(file)]) == 0
    rows = [{**row, "shape": tuple(row["shape"])} for row in json.loads(file.read_text())["rows"]]
    measured = [tuple(row[key] for key in ("op", "way", "dtype", "shape", "cold")) for row in rows]
    assert len(measured) == len(set(measured))
    assert list(dict.fromkeys(row["shape"] for row in rows if row["op"] == "linear")) == [(2, 8, 4), (1, 8, 4)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("check", "--json", ""), "argument --json: expected a path, got ''"),
        (("check", "--json", "DIR"), "--json: expected a file to write, got DIR, which is a directory"),
        (("check", "--json", "FILE/x"), "--json: expected a directory to write x to, got FILE, which is none: make it"),
        (("aot", "--cache", ""), "argument --cache: expected a path, got ''"),
        (("aot", "--out", ""), "argument --out: expected a path, got ''"),
        (("aot", "--out", "FILE"), "--out: expected a directory to write to, got FILE, which is a file"),
        (("aot", "--cache", "FILE/x"), "--cache: expected a directory to write to, got FILE/x, and "),
        (("aot", "--markdown", "DIR"), "--markdown: expected a file to write, got DIR, which is a directory"),
        (("aot", "--markdown", "none/x"), "--markdown: expected a directory to write x to, got none, which is none"),
        (("bench", "--json", "DIR"), "--json: expected a file to write, got DIR, which is a directory"),
        (("bench", "--rows", ""), "argument --rows: expected a positive integer, got ''"),
        (("bench", "--widths", "768"), "argument --widths: expected INxOUT, such as 768x3072, got '768'"),
        (("roof", "--threads", "99999999999999"), "expected at most 1,024 threads, got 99,999,999,999,999"),
        (("tune", *WIDTHS, "--json", "DIR"), "--json: expected a file to write, got DIR, which is a directory"),
        (("tune", *WIDTHS, "--seconds", "0"), "argument --seconds: expected a positive integer, got '0'"),
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
    Path("DIR").mkdir()
    Path("FILE").touch()
    line = refused(main, capsys, *arguments)
    assert line.startswith(f"python -m kernels {arguments[0]}: error: ")
    assert sentence in line
    assert sorted(it.name for it in tmp_path.iterdir()) == ["DIR", "FILE"]
