"""Rows go in and results come out, as arrays or as JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from models.__main__ import main
from tests.command_line import refused

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


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
    assert sentence in refused(main, capsys, "run", "digits", "--input", str(tmp_path / "in"))


def test_run_refuses_what_is_no_regular_file_and_may_have_no_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/zero", str(tmp_path / "pipe"), str(tmp_path)):
        assert f"{path}: expected a regular file" in refused(main, capsys, "run", "digits", "--input", path)
    assert "No such file" in refused(main, capsys, "run", "digits", "--input", str(tmp_path / "nothing"))


@pytest.mark.parametrize("count", [10**12, 10**20, 1])
def test_run_refuses_an_array_whose_head_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    with (tmp_path / "in.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": (count,)})
        file.write(bytes(16))
    sentence = refused(main, capsys, "run", "digits", "--input", str(tmp_path / "in.npy"))
    assert f"expected {8 * count:,} bytes behind its head, as that claims, got 16" in sentence


@pytest.mark.parametrize(
    "head",
    [
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (0, 9999999999999999999)}\n",
        b"(" * 3000 + b"\n",
        b"{'descr\n",
    ],
    ids=["beyond any size", "deep", "cut"],
)
def test_run_refuses_an_array_whose_head_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: bytes
) -> None:
    (tmp_path / "in.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head)
    sentence = refused(main, capsys, "run", "digits", "--input", str(tmp_path / "in.npy"))
    assert "expected an .npy array or a JSON list of numbers" in sentence


def test_run_never_reads_a_pickle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "in.npy", np.array([{}], dtype=object), allow_pickle=True)
    assert "expected an .npy array" in refused(main, capsys, "run", "digits", "--input", str(tmp_path / "in.npy"))


def test_run_with_a_backend_that_does_not_exist_lists_those_that_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("[]")
    line = refused(main, capsys, "run", "digits", "--backend", "fusd", "--input", str(tmp_path / "in"))
    assert "expected one of eager, compiled, fused, got 'fusd'" in line


@pytest.mark.parametrize("count", ["0", "-1", "2.5"])
def test_threads_that_are_no_count_are_refused_before_anything_is_read(
    count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["run", "digits", f"--threads={count}"])
    assert stop.value.code == 2
    assert f"argument --threads: expected a positive integer, got '{count}'" in capsys.readouterr().err
