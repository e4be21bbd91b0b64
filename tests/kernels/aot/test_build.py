import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.aot import build
from kernels.aot.build import compile_all
from kernels.aot.cases import cases
from kernels.tiles import Tile
from tests.kernels.aot.made_case import matrix_case


@pytest.mark.slow
def test_a_tile_that_spills_is_told_from_one_that_does_not(tmp_path: Path) -> None:
    large = Tile(128, 128, 64, 8, 3)
    compiled = compile_all([matrix_case("sm_80", tile=large), matrix_case("sm_90", tile=large)], tmp_path, jobs=1)
    assert [bool(each.faults) for each in compiled] == [True, False]
    assert "spills" in compiled[0].faults[0]


@pytest.mark.slow
def test_what_does_not_compile_is_a_fault_and_is_not_kept(tmp_path: Path) -> None:
    wrong = replace(matrix_case(), num_warps=3)
    (compiled,) = compile_all([wrong], tmp_path, jobs=1)
    (fault,) = compiled.faults
    assert fault.startswith("does not compile: ")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.slow
def test_what_was_compiled_once_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in cases(["gfx942"]) if case.kernel == "gated_activation")
    first = compile_all([case], tmp_path)

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a compiling process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert compile_all([case], tmp_path) == first
    monkeypatch.setattr(build, "source_hash", lambda _: "another")
    assert build._cached(case, tmp_path) is None


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        ("", RuntimeError, "aot: a compiling process ended early, at gated_linear"),
        ("input()", RuntimeError, "aot: a compiling process ended early, at gated_linear"),
        (
            "import json, os; _, path = json.loads(input()); os.mkdir(path + '.json'); print('{}')",
            IsADirectoryError,
            r"\.json",
        ),
        ("input(); print('{}')", FileNotFoundError, r"\.bin"),
    ],
    ids=["before it is told", "before it answers", "a cache not to be written", "no code written"],
)
def test_what_goes_wrong_in_a_thread_is_raised(
    code: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = subprocess.Popen

    def start(_: list[str], **options: Any) -> "subprocess.Popen[str]":
        process = genuine([sys.executable, "-c", code], **options)
        if not code:
            process.wait()
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(error, match=message):
        compile_all([matrix_case("sm_80"), matrix_case("sm_90")], tmp_path, jobs=2)
