"""What holds for every command of the kernels: a mistake is one line, told before any work."""

import argparse
from pathlib import Path

import pytest

from kernels.__main__ import _parser, main
from tests.command_line import refused

WIDTHS = ("--widths", "4x4", "--rows", "1")
(COMMANDS,) = (it.choices for it in _parser()._actions if isinstance(it, argparse._SubParsersAction))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_tells_the_default_of_each_flag_that_has_one(command: str) -> None:
    silent = [
        action.dest
        for action in COMMANDS[command]._actions
        if action.default not in (None, False, argparse.SUPPRESS) and "default: " not in (action.help or "")
    ]
    assert silent == []


def test_what_a_list_names_twice_is_measured_once() -> None:
    assert _parser().parse_args(["bench", "--rows", "4,1,4"]).rows == [4, 1]


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
