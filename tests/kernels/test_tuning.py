import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernels import gated_linear, tiles, tuning
from kernels.__main__ import main
from kernels.numerics import disagreement
from kernels.rms_gated_linear import rms_gated_linear_torch
from kernels.tiles import Tile, read_table
from kernels.timing import Timing
from kernels.tuning import Problem, candidates, few_candidates, merged, problems, tune, write_entries


def test_row_counts_are_covered_without_a_gap_and_without_an_end() -> None:
    found = problems(["linear"], ["bfloat16"], [(768, 3072)], [512, 1, 32])
    assert [each[-3:] for each in found] == [(1, 1, 1), (32, 2, 32), (512, 33, None)]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("op", ["linear", "gated_linear", "rms_gated_linear"])
@pytest.mark.parametrize("rows", [1, 64, 8192])
def test_candidates_are_what_triton_takes_and_what_the_chip_has(op: str, rows: int, arch: str) -> None:
    found = list(candidates(Problem(op, "bfloat16", 768, 3072, rows, rows, rows), arch, 132))
    assert len(found) > 8
    assert len(set(found)) == len(found)
    assert any(tile.feed == "tma" for tile in found) == (arch == "sm_90" and rows >= 64)
    assert all(tile.block_m <= max(16, rows) for tile in found)
    few = list(few_candidates(Problem(op, "bfloat16", 768, 3072, rows, rows, rows), arch, 132))
    assert 2 < len(few) < len(found) / 2
    assert len(set(few)) == len(few)
    assert few[0] in tiles.shipped(op, torch.bfloat16, "gfx942")


def test_the_computed_default_is_that_of_the_gpu_at_hand(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("linear", "bfloat16", 768, 3072, 512, 1, None)
    few, many = (next(few_candidates(problem, "sm_90", count)) for count in (108, 304))
    assert (few.block_m, many.block_m) == (128, 64)
    asked: list[int] = []

    def tiles_for(_: Problem, __: str, multiprocessors: int) -> Iterator[Tile]:
        asked.append(multiprocessors)
        return iter([Tile(16, 16, 32, 4, 3)])

    monkeypatch.setattr(tuning, "multiprocessor_count", lambda _: 7)
    tune(problems(["linear"], ["float16"], [(40, 24)], [3]), "sm_90", device, 2, tiles_for)
    assert asked == [7]


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where tables stand, one for sm_90 with a tile of gated_linear that was measured for up to 8 rows."""
    tile = dict(zip(tiles.SIZES, (16, 16, 32, 4, 3), strict=True))
    at = {"op": "gated_linear", "dtype": "float16", "in_features": 40, "out_features": 24}
    entries = [
        {**at, "least_rows": 1, "most_rows": 8, "tile": tile, "source": "measured"},
        {**at, "least_rows": 9, "most_rows": None, "tile": tile, "source": "computed"},
    ]
    (tmp_path / "sm_90.json").write_text(json.dumps(entries))
    monkeypatch.setattr(tiles, "TABLES", tmp_path)
    tiles.forget_tables()
    yield tmp_path
    tiles.forget_tables()


@pytest.mark.parametrize(("rows", "arch"), [([3, 64], "sm_90"), ([3], "sm_80")])
def test_a_folded_norm_is_not_compared_with_what_is_not_tuned(
    rows: list[int], arch: str, tables: Path, device: torch.device
) -> None:
    wanted = problems(["rms_gated_linear"], ["float16"], [(40, 24)], rows)
    with pytest.raises(RuntimeError, match=rf"got none for float16, {rows[-1]}x40x24, on {arch}: tune it first, or"):
        tune(wanted, arch, device, 2)


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize("op", ["linear", "gated_linear", "rms_gated_linear"])
def test_the_fastest_that_works_becomes_an_entry_that_can_be_read(
    op: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, broken = Tile(16, 16, 32, 4, 3), Tile(16, 24, 32, 4, 3)  # 24 is no power of two
    wanted = problems([op], ["float16"], [(40, 24)], [3])
    entries = tune(wanted, "sm_90", device, 2, lambda *_: iter([broken, good]))
    path = tmp_path / "new.json"
    write_entries(entries, path)
    (entry,) = read_table(path)
    assert (entry.op, entry.tile, entry.source) == (op, good, "measured")
    assert (entry.least_rows, entry.most_rows, entry.in_features, entry.out_features) == (1, None, 40, 24)
    assert json.loads(path.read_text())[0]["rows_measured"] == 3
    with pytest.raises(RuntimeError, match="no candidate works for Problem"):
        tune(wanted, "sm_90", device, 2, lambda *_: iter([broken]))


def test_a_wrong_candidate_is_none(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated_linear, "launch", lambda _, out, *__: out.zero_())
    with pytest.raises(RuntimeError, match="no candidate works"):
        tune(problems(["gated_linear"], ["float32"], [(40, 24)], [3]), "sm_90", device, 2)


def test_new_entries_replace_those_of_the_same_widths_and_come_first() -> None:
    def entry(op: str, width: int | None, rows: int, most: int | None = None) -> dict[str, object]:
        at = {"in_features": width, "out_features": 8, "least_rows": rows, "most_rows": most}
        return {"op": op, "dtype": "float16", **at}

    old = [entry("linear", 768, 1), entry("linear", None, 2), entry("gated_linear", 768, 3)]
    new = [entry("linear", 768, 1, 4), entry("linear", 768, 5)]
    assert merged(new, old) == [*new, *old[1:]]
    assert merged(new[:1], old) == [new[0], *old]  # for above 4 rows nothing was measured


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(("folded_s", "is_folded"), [(2e-5, True), (2.8e-5, False), (4e-5, False)])
def test_a_folded_norm_is_compared_with_one_of_its_own(
    folded_s: float, is_folded: bool, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: dict[str, torch.Tensor] = {}

    def timed(calls: dict[str, Callable[[], torch.Tensor]], *_: object) -> dict[str, Timing]:
        results.update({name: call() for name, call in calls.items()})
        seconds = {name: 3e-5 if name == tuning.SEPARATE else folded_s for name in calls}
        return {name: spread(each) for name, each in seconds.items()}

    monkeypatch.setattr(tuning, "interleaved", timed)
    wanted = problems(["rms_gated_linear"], ["float16"], [(40, 24)], [3])
    entries = tune(wanted, "sm_90", device, 2, lambda *_: iter([Tile(16, 16, 32, 4, 3)]))
    operands = tuning._operands(wanted[0], device)[0]
    eager, exact = (
        rms_gated_linear_torch(*each, activation=tuning.ACTIVATION, eps=tuning.EPS)
        for each in (operands, [it.double() for it in operands])
    )
    assert tuning.SEPARATE in results
    assert [disagreement(each, eager, exact) for each in results.values()] == [None, None]
    write_entries(entries, tmp_path / "new.json")
    (entry,) = read_table(tmp_path / "new.json")
    assert entry.is_folded == is_folded
    (found,) = entries
    assert (found["microseconds"], found["separate_microseconds"]) == (pytest.approx(folded_s * 1e6), 30.0)
    assert found["separate_spread_microseconds"] == [27.0, 33.0]
    assert found["spread_microseconds"] == pytest.approx([folded_s * 0.9e6, folded_s * 1.1e6])


def spread(median_s: float) -> Timing:
    return Timing(median_s, median_s * 0.9, median_s * 1.1, 10)


def test_no_problem_is_begun_after_the_deadline(device: torch.device) -> None:
    wanted = problems(["linear"], ["float32"], [(40, 24)], [3])
    assert tune(wanted, "sm_90", device, 2, deadline=time.monotonic() - 1) == []


@pytest.mark.parametrize(("left_out", "status"), [(0, 0), (1, 1)])
def test_the_command_writes_each_ops_tiles_before_what_is_compared_with_them(
    left_out: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tile = Tile(16, 16, 32, 4, 3)
    seen: list[tuple[str, Tile | None]] = []

    def stand_in(wanted: list[Problem], arch: str, *_: object, **options: object) -> list[dict[str, object]]:
        assert options["tiles_for"] is few_candidates
        seen.append((wanted[0].op, tiles.listed_tile("gated_linear", arch, torch.float16, 3, 40, 24)))
        done = wanted[: len(wanted) - left_out * (wanted[0].op == "rms_gated_linear")]
        rivals = {each: spread(2e-5) if each.op == "rms_gated_linear" else None for each in done}
        return [tuning._entry(each, tile, spread(1e-5), rivals[each], torch.device("cpu")) for each in done]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tiles, "arch_of", lambda _: "sm_90")
    monkeypatch.setattr(tiles, "TABLES", tmp_path)
    monkeypatch.setattr(tuning, "tune", stand_in)
    tiles.forget_tables()
    try:
        options = ["--ops", "rms_gated_linear,gated_linear", "--dtypes", "float16", "--few", "--seconds", "9"]
        assert main(["tune", "--widths", "40x24", "--rows", "1,8", *options]) == status
        assert tiles.is_norm_folded("sm_90", torch.float16, 1, 40, 24)
        assert tiles.is_norm_folded("sm_90", torch.float16, 8, 40, 24) == (left_out == 0)
    finally:
        tiles.forget_tables()
    assert seen == [("gated_linear", None), ("rms_gated_linear", tile)]
    assert ("shapes left out: 1, since 9 seconds were over" in capsys.readouterr().err) == bool(left_out)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_text() for path in tiles.TABLES.glob("*.json")}
    assert main(["tune", "--widths", "768x3072", "--rows", "1,8"]) == 2
    assert "tiles are measured on a CUDA or ROCm GPU, and none is present" in capsys.readouterr().err
    assert {path: path.read_text() for path in tiles.TABLES.glob("*.json")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--widths", "768", "--rows", "1"], "expected INxOUT, such as 768x3072, got '768'"),
        (["--widths", "768x3072", "--rows", "0"], "expected a positive integer, got '0'"),
        (
            ["--widths", "768x3072", "--rows", "1", "--ops", "norm"],
            "expected one of gated_linear, rms_gated_linear, linear, got 'norm'",
        ),
    ],
)
def test_wrong_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["tune", *options])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
