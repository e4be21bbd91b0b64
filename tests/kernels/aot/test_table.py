"""What the committed table holds, and how it is made."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton

from kernels.__main__ import main
from kernels.aot import build
from kernels.aot.build import compile_all
from kernels.aot.cases import KERNELS, MATRIX_KERNELS, Case, cases
from kernels.aot.machine_code import Reading
from kernels.aot.source import source_hash
from kernels.aot.table import Compiled, to_json, to_markdown
from kernels.aot.targets import ARCHS
from tests.kernels.aot.made_case import matrix_case

RESULTS = Path(__file__).parents[3] / "docs/results"
RENEW = "run: python -m kernels aot --json docs/results/aot.json --markdown docs/results/aot.md"


def last_of_each_kernel(arch: str) -> dict[str, Case]:
    return {case.kernel: case for case in cases([arch]) if case.dtype != "fp32"}


@pytest.fixture(scope="module")
def anew(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Compiled]:
    """One case of each kernel for each chip, compiled at once: a compiling process takes as long to start as a case."""
    wanted = [case for arch in ARCHS for case in last_of_each_kernel(arch).values()]
    return dict(zip(wanted, compile_all(wanted, tmp_path_factory.mktemp("aot")), strict=True))


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    values: list[dict[str, Any]] = json.loads((RESULTS / "aot.json").read_text())
    return values


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
        if record["kernel"] in MATRIX_KERNELS and not has_none_to_ask_for:
            assert record["matrix_instruction"] is not None, record


def test_operands_are_read_16_bytes_at_a_time(records: list[dict[str, Any]]) -> None:
    for record in records:
        if record["kernel"] in MATRIX_KERNELS or record["arch"] != "gfx942":
            assert record["wide_loads"] > 0, record


def test_the_readable_table_is_made_of_the_other(records: list[dict[str, Any]]) -> None:
    assert (RESULTS / "aot.md").read_text() == to_markdown(records), RENEW


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_compiling_again_gives_the_committed_table(
    arch: str, records: list[dict[str, Any]], anew: dict[Case, Compiled]
) -> None:
    by_kernel = last_of_each_kernel(arch)
    shipped = {each["kernel"] for each in records if each["arch"] == arch}
    assert set(by_kernel) == shipped
    assert set(KERNELS) - shipped <= {
        "gated_linear_tma",
        "rms_gated_linear_tma",
        "linear_tma",
    }  # not every chip has a use for these
    for each in (anew[case] for case in by_kernel.values()):
        assert each.faults == []
        assert each.binary[1:4] == b"ELF"
        if triton.__version__ == records[0]["triton"]:
            assert each.record() in records


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


@pytest.mark.parametrize(("reading", "status"), [(GOOD, 0), (replace(GOOD, stack_bytes=8), 1)])
def test_the_command_fails_where_a_kernel_has_a_fault(
    reading: Reading, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = [Compiled(matrix_case(), reading, "abc", b"\x7fELF")]
    monkeypatch.setattr(build, "compile_all", lambda *_: compiled)
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
