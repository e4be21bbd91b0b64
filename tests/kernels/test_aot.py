import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton

from kernels import aot
from kernels.__main__ import main
from kernels.aot import ARCHS, KERNELS, Case, Compiled, Reading, cases, compile_all, source_hash, to_json, to_markdown
from kernels.tiles import Tile

RESULTS = Path(__file__).parents[2] / "docs/results"
RENEW = "run: python -m kernels aot --json docs/results/aot.json --markdown docs/results/aot.md"


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = json.loads((RESULTS / "aot.json").read_text())
    return values


MEDIUM = Tile(64, 64, 64, 4, 3)


def matrix_case(arch: str = "sm_90", dtype: str = "bf16", tile: Tile = MEDIUM) -> Case:
    blocks = ("BLOCK_M", tile.block_m), ("BLOCK_N", tile.block_n), ("BLOCK_K", tile.block_k)
    parameters = ("ACTIVATION", "gelu_tanh"), *blocks, ("GROUP", 8)
    return Case("gated_linear", arch, dtype, parameters, (), tile.num_warps, tile.num_stages)


GOOD = Reading(registers=128, shared_bytes=98304, matrix_instructions=8, wide_loads=24)


def test_the_committed_table_is_of_this_source_and_of_every_shipped_tile(records: list[dict[str, Any]]) -> None:
    def identity(record: dict[str, Any]) -> str:
        return json.dumps([record[name] for name in ("kernel", "dtype", "activation", "arch", "tile", "absent")])

    shipped = {identity(Compiled(case, GOOD, "").record()) for case in cases()}
    assert {identity(record) for record in records} == shipped, RENEW
    for record in records:
        assert record["source"] == source_hash(record["kernel"]), f"{record['kernel']} changed; {RENEW}"


def test_no_committed_kernel_spills_or_misses_its_instruction_or_overflows_shared_memory(
    records: list[dict[str, Any]],
) -> None:
    for record in records:
        assert record["error"] is None, record
        assert record["stack_bytes"] == 0, record
        assert 0 < record["registers"] <= 512, record
        assert record["shared_bytes"] <= ARCHS[record["arch"]].shared_bytes, record
        assert record["matrix_instructions"] > 0 or record["matrix_instruction"] is None, record
        has_none_to_ask_for = record["dtype"] == "fp32" and record["arch"] != "gfx942"
        if record["kernel"] in aot.MATRIX_KERNELS and not has_none_to_ask_for:
            assert record["matrix_instruction"] is not None, record


def test_operands_are_read_16_bytes_at_a_time(records: list[dict[str, Any]]) -> None:
    for record in records:
        if record["kernel"] in aot.MATRIX_KERNELS or record["arch"] != "gfx942":
            assert record["wide_loads"] > 0, record


def test_the_readable_table_is_made_of_the_other(records: list[dict[str, Any]]) -> None:
    assert (RESULTS / "aot.md").read_text() == to_markdown(records), RENEW


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_compiling_again_gives_the_committed_table(arch: str, records: list[dict[str, Any]], tmp_path: Path) -> None:
    by_kernel = {case.kernel: case for case in cases([arch]) if case.dtype != "fp32"}  # the last one of each
    shipped = {each["kernel"] for each in records if each["arch"] == arch}
    assert set(by_kernel) == shipped
    assert set(KERNELS) - shipped <= {"gated_linear_tma", "linear_tma"}  # not every chip has a use for these
    compiled = compile_all(list(by_kernel.values()), tmp_path)
    for each in compiled:
        assert each.faults == []
        assert each.binary[1:4] == b"ELF"
        if triton.__version__ == records[0]["triton"]:
            assert each.record() in records


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
    monkeypatch.setattr(aot, "source_hash", lambda _: "another")
    assert aot._cached(case, tmp_path) is None


@pytest.mark.parametrize(
    ("reading", "fault"),
    [
        (GOOD, None),
        (replace(GOOD, stack_bytes=104), "spills: 104 bytes of stack a thread, expected none"),
        (replace(GOOD, matrix_instructions=0), "has no HGMMA instruction"),
        (replace(GOOD, shared_bytes=232449), "needs 232449 bytes of shared memory, sm_90 has 232448"),
        (Reading(error="CompilationError: at 3:4"), "does not compile: CompilationError: at 3:4"),
    ],
)
def test_faults_say_what_is_wrong(reading: Reading, fault: str | None) -> None:
    assert Compiled(matrix_case(), reading, "").faults == ([] if fault is None else [fault])


@pytest.mark.parametrize(
    ("arch", "dtype", "block_m", "expected"),
    [
        ("sm_80", "bf16", 64, "HMMA"),
        ("sm_90", "fp16", 64, "HGMMA"),
        ("sm_90", "fp16", 32, "HMMA"),
        ("sm_100", "bf16", 128, "UTCHMMA"),
        ("sm_100", "bf16", 16, "HMMA"),
        ("sm_90", "fp32", 64, None),
        ("gfx942", "fp32", 16, "v_mfma"),
        ("gfx942", "bf16", 64, "v_mfma"),
    ],
)
def test_each_chip_is_asked_for_its_own_matrix_instruction(
    arch: str, dtype: str, block_m: int, expected: str | None
) -> None:
    assert matrix_case(arch, dtype, Tile(block_m, 64, 64, 4, 3)).matrix_instruction == expected


def test_elementwise_kernels_are_asked_for_no_matrix_instruction() -> None:
    kernels = {case.kernel for case in cases(["sm_90"]) if case.matrix_instruction is not None}
    assert kernels == aot.MATRIX_KERNELS


def test_cases_are_named_apart() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


def test_an_unknown_architecture_or_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="arch must be one of sm_80, sm_90, sm_100, gfx942, got 'sm_70'"):
        cases(["sm_70"])
    with pytest.raises(ValueError, match=r"kernel must be one of gated_activation, .*, got 'attention'"):
        source_hash("attention")


def test_a_source_hash_sees_code_and_neither_comments_nor_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in aot.PACKAGE.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    before = {kernel: source_hash(kernel) for kernel in KERNELS}
    norm = tmp_path / "norm.py"
    norm.write_text(norm.read_text().replace("/ N + eps", "/ N + 2 * eps") + "# a comment\n")
    linear = tmp_path / "linear.py"
    linear.write_text(linear.read_text() + "# a comment\n")
    monkeypatch.setattr(aot, "PACKAGE", tmp_path)
    source_hash.cache_clear()
    try:
        changed = [kernel for kernel in KERNELS if source_hash(kernel) != before[kernel]]
    finally:
        source_hash.cache_clear()
    assert changed == ["norm"]


@pytest.mark.parametrize(("reading", "status"), [(GOOD, 0), (replace(GOOD, stack_bytes=8), 1)])
def test_the_command_fails_where_a_kernel_has_a_fault(
    reading: Reading, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = [Compiled(matrix_case(), reading, "abc", b"\x7fELF")]
    monkeypatch.setattr(aot, "compile_all", lambda *_: compiled)
    options = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "a.json"), "--cache", str(tmp_path)]
    assert main(["aot", "--arch", "sm_90", *options]) == status
    assert (tmp_path / "a.json").read_text() == to_json(compiled)
    assert [path.suffix for path in (tmp_path / "out").iterdir()] == [".cubin"]
    printed = capsys.readouterr()
    assert "HGMMA" in printed.out
    assert ("spills: 8 bytes" in printed.err) == bool(status)


def test_the_command_refuses_an_unknown_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["aot", "--arch", "sm_70"]) == 2
    assert "aot: arch must be one of sm_80, sm_90, sm_100, gfx942, got 'sm_70'" in capsys.readouterr().err
