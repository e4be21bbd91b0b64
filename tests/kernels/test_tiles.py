import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import tiles
from kernels.aot.targets import ARCHS
from kernels.tiles import Tile, gated_linear_tile, linear_tile, listed_tile, rms_gated_linear_tile, shipped, split_k

ROWS = [1, 16, 17, 32, 33, 64, 65, 128, 129, 8192]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def tiles_of(dtype: torch.dtype, rows: int) -> tuple[Tile, Tile, Tile]:
    return gated_linear_tile(dtype, rows), linear_tile(dtype, rows, 768, 132), rms_gated_linear_tile(dtype, rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tiles_are_what_triton_takes(dtype: torch.dtype, rows: int) -> None:
    for tile in tiles_of(dtype, rows):
        assert all(size >= 16 and size & (size - 1) == 0 for size in tile[:3])
        assert tile.num_warps in {4, 8}
        assert tile.num_stages >= 2


def test_few_rows_waste_no_tile() -> None:
    for dtype in DTYPES:
        for rows, height in ((1, 16), (16, 16), (17, 32), (32, 32)):
            assert [tile.block_m for tile in tiles_of(dtype, rows)] == [height] * 3


def test_k_is_split_only_where_multiprocessors_would_idle() -> None:
    def parts(rows: int, in_features: int, out_features: int, multiprocessors: int = 132) -> int:
        tile = linear_tile(torch.bfloat16, rows, out_features, multiprocessors)
        return split_k(tile, rows, in_features, out_features, multiprocessors)

    assert [parts(rows, 3072, 768) for rows in (1, 64, 256, 512, 8192)] == [4, 8, 2, 1, 1]
    assert parts(1, 14336, 4096) == 1
    assert parts(1, 3072, 768, multiprocessors=24) == 1
    assert parts(1, 64, 64) == 1  # too short to split
    assert parts(0, 3072, 768) == 1
    assert split_k(Tile(16, 16, 16, 4, 3, "tma"), 1, 3072, 768, 132) == 1


def test_every_default_fits_the_shared_memory_of_the_smallest_gpus() -> None:
    records = json.loads((Path(__file__).parents[2] / "docs/results/aot.json").read_text())
    defaults = {
        (op, name, tile)
        for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16))
        for rows in ROWS
        for op, tile in zip(("gated_linear", "linear", "rms_gated_linear"), tiles_of(dtype, rows), strict=True)
    }
    found = set()
    for record in records:
        sizes = [record["tile"].get(name, 0) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")]
        key = record["kernel"], record["dtype"], Tile(*sizes)
        if key in defaults:
            found.add((key, record["arch"]))
            assert record["shared_bytes"] <= (64 if record["arch"] == "gfx942" else 99) * 1024, record
    assert len(found) == 4 * len(defaults)


def entry(**changes: object) -> dict[str, object]:
    tile = {"block_m": 64, "block_n": 128, "block_k": 64, "num_warps": 4, "num_stages": 3}
    values: dict[str, object] = {"op": "linear", "dtype": "bfloat16", "in_features": 768, "out_features": None}
    values |= {"least_rows": 65, "most_rows": 128, "tile": tile, "source": "computed"} | changes
    return values


@pytest.fixture
def tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(tiles, "TABLES", tmp_path)
    tiles.forget_tables()
    yield tmp_path
    tiles.forget_tables()


def test_a_table_is_read_where_it_fits_and_the_first_entry_wins(tables: Path) -> None:
    general = entry(in_features=None, most_rows=None, tile=entry()["tile"] | {"block_m": 32})  # type: ignore[operator]
    (tables / "sm_90.json").write_text(json.dumps([entry(), general]))
    narrow, wide = Tile(64, 128, 64, 4, 3), Tile(32, 128, 64, 4, 3)
    for rows, width, dtype, expected in [
        (65, 768, torch.bfloat16, narrow),
        (128, 768, torch.bfloat16, narrow),
        (129, 768, torch.bfloat16, wide),
        (100_000, 1000, torch.bfloat16, wide),
        (64, 768, torch.bfloat16, None),
        (65, 768, torch.float16, None),
    ]:
        assert listed_tile("linear", "sm_90", dtype, rows, width, 57) == expected
    assert listed_tile("gated_linear", "sm_90", torch.bfloat16, 65, 768, 57) is None
    assert listed_tile("linear", "sm_80", torch.bfloat16, 65, 768, 57) is None
    assert listed_tile("linear", None, torch.bfloat16, 65, 768, 57) is None
    assert not tiles.is_norm_folded("sm_90", torch.bfloat16, 65, 768, 57)
    assert shipped("linear", torch.bfloat16, "sm_90")[-2:] == [narrow, wide]


def test_a_norm_is_folded_where_that_was_measured_to_be_faster(tables: Path) -> None:
    measured = {"op": "rms_gated_linear", "source": "measured", "out_features": 57}
    few, many = {"least_rows": 1, "most_rows": 8}, {"least_rows": 9, "most_rows": None}
    entries = [entry(**measured, **few, is_folded=True), entry(**measured, **many, is_folded=False)]
    (tables / "sm_90.json").write_text(json.dumps(entries))
    found = [tiles.is_norm_folded("sm_90", torch.bfloat16, rows, 768, 57) for rows in (1, 8, 9, 8192)]
    assert found == [True, True, False, False]
    assert not tiles.is_norm_folded("sm_90", torch.bfloat16, 8, 768, 58)
    assert not tiles.is_norm_folded("sm_90", torch.float16, 8, 768, 57)
    assert not tiles.is_norm_folded("sm_80", torch.bfloat16, 8, 768, 57)
    assert not tiles.is_norm_folded(None, torch.bfloat16, 8, 768, 57)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "sm_90.json: not JSON"),
        ("{}", "sm_90.json: must be a list of entries, got dict"),
        ("[3]", "sm_90.json, entry 0: must be an object, got 3"),
        (json.dumps([entry(), entry(colour=1)]), "entry 1: unknown key 'colour'"),
        (json.dumps([{"op": "linear"}]), "entry 0: dtype is missing"),
        (
            json.dumps([entry(op="attention")]),
            "op must be one of gated_linear, rms_gated_linear, linear, got 'attention'",
        ),
        (json.dumps([entry(dtype=3)]), "dtype must be one of float32, bfloat16, float16, got 3"),
        (json.dumps([entry(in_features=0)]), "in_features must be a whole number above zero or null, got 0"),
        (json.dumps([entry(least_rows=True)]), "least_rows must be a whole number above zero, got True"),
        (json.dumps([entry(most_rows=64)]), r"most_rows must be 65 \(least_rows\) or more, got 64"),
        (json.dumps([entry(source="guessed")]), "source must be one of computed, measured, got 'guessed'"),
        (json.dumps([entry(op="rms_gated_linear")]), "entry 0: is_folded is missing"),
        (json.dumps([entry(is_folded=True)]), "entry 0: unknown key 'is_folded'"),
        (json.dumps([entry(op="rms_gated_linear", is_folded=1)]), "is_folded must be true or false, got 1"),
        (
            json.dumps([entry(op="rms_gated_linear", is_folded=True)]),
            "is_folded must be false where source is 'computed': what is not measured is not used",
        ),
        (json.dumps([entry(microseconds="fast")]), "microseconds must be float, got 'fast'"),
        (
            json.dumps([entry(tile=dict.fromkeys(tiles.SIZES, 16) | {"feed": "air"})]),
            "feed must be one of pointers, tma",
        ),
        (json.dumps([entry(tile={"block_m": 64})]), "entry 0, tile: block_n is missing"),
        (json.dumps([entry(tile=dict.fromkeys(tiles.SIZES, 24))]), "block_m must be a power of two, got 24"),
        (json.dumps([entry(tile=dict.fromkeys(tiles.SIZES, 8))]), "block_m must be 16 or more, got 8"),
    ],
)
def test_a_table_that_is_wrong_is_refused_naming_file_and_entry(text: str, message: str, tables: Path) -> None:
    (tables / "sm_90.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        listed_tile("linear", "sm_90", torch.bfloat16, 65, 768, 57)


def test_the_shipped_tables_can_be_read() -> None:
    paths = list(tiles.TABLES.glob("*.json"))
    assert paths
    for path in paths:
        assert path.stem in ARCHS
        for each in tiles.read_table(path):
            assert each.source == "computed" or path.read_text().count('"device"') > 0


def test_a_cpu_has_no_table() -> None:
    assert tiles.arch_of(torch.device("cpu")) is None
