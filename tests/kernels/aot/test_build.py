import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.aot import build
from kernels.aot.build import compile_all
from kernels.aot.cases import Case
from kernels.aot.table import Compiled
from kernels.tiles import Tile
from tests.kernels.aot.made_case import matrix_case

LARGE = Tile(128, 128, 64, 8, 3)
SPILLING, FITTING = (matrix_case(arch, tile=LARGE) for arch in ("sm_80", "sm_90"))
WRONG = replace(matrix_case(), num_warps=3)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("aot")


@pytest.fixture(scope="module")
def compiled(cache: Path) -> dict[Case, Compiled]:
    """What one process makes of these cases; its start takes longer than they do."""
    wanted = [SPILLING, WRONG, FITTING]
    return dict(zip(wanted, compile_all(wanted, cache, jobs=1), strict=True))


@pytest.mark.slow
def test_a_tile_that_spills_is_told_from_one_that_does_not(compiled: dict[Case, Compiled]) -> None:
    assert [bool(compiled[case].faults) for case in (SPILLING, FITTING)] == [True, False]
    assert "spills" in compiled[SPILLING].faults[0]


@pytest.mark.slow
def test_what_does_not_compile_is_a_fault_and_is_not_kept(compiled: dict[Case, Compiled], cache: Path) -> None:
    (fault,) = compiled[WRONG].faults
    assert fault.startswith("does not compile: ")
    assert build._cached(WRONG, cache) is None
    assert len(list(cache.glob("*.json"))) == 2  # of those that compile


@pytest.mark.slow
def test_what_was_compiled_once_is_read_from_the_cache(
    compiled: dict[Case, Compiled], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("a compiling process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert compile_all([FITTING, SPILLING], cache) == [compiled[FITTING], compiled[SPILLING]]
    monkeypatch.setattr(build, "source_hash", lambda _: "another")
    assert build._cached(FITTING, cache) is None


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
