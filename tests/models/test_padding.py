"""Rows padded up to a count that oneDNN has code for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.backends import mkldnn

from models.backends import READY_FLOPS, READY_ROWS
from models.backends.padding import padded_row_counts, padded_rows
from models.config import ModelConfig
from models.engine import load_engine
from tests.models.test_numerics import faults

Configs = Callable[..., ModelConfig]
Writer = Callable[[ModelConfig], Path]

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

WIDTHS = {"in_features": 57, "out_features": 83, "dim": 72, "hidden": 200}  # too large for PyTorch's own product


def test_rows_are_padded_by_an_eighth_at_most_and_small_counts_not_at_all(tiny: Configs) -> None:
    padded = {rows: padded_rows(tiny(), rows) for rows in range(1, 5000)}
    assert all(padded[rows] == rows for rows in range(1, READY_ROWS + 1))
    assert all(rows <= it < rows * 1.125 for rows, it in padded.items())
    assert all(it < rows * 1.0625 for rows, it in padded.items() if rows > 2 * READY_ROWS)
    assert all(padded.get(it, it) == it for it in padded.values())  # a count that is run is padded to itself
    assert [padded[rows] for rows in (65, 72, 73, 128, 256, 257, 512, 513)] == [72, 72, 80, 128, 256, 272, 512, 544]
    assert len({padded[rows] for rows in range(READY_ROWS + 1, 513)}) == 40


def test_no_row_is_added_where_a_pass_is_much_work(tiny: Configs) -> None:
    config = tiny(dim=768, hidden=3072, depth=4)
    most = READY_FLOPS // config.flops_per_row
    assert most < 72
    assert [padded_rows(config, rows) for rows in (65, most, most + 1, 300)] == [65, most, most + 1, 300]


def test_the_warm_up_meets_what_every_row_count_is_padded_to(tiny: Configs) -> None:
    for max_rows in (1, 64, 65, 500, 1024):
        assert padded_row_counts(tiny(), max_rows) == sorted(
            {padded_rows(tiny(), rows) for rows in range(1, max_rows + 1)}
        )
    assert padded_row_counts(tiny(dim=768, hidden=3072, depth=4), 512) == [*range(1, 71), 512]


@pytest.mark.parametrize("backend", ["fused", pytest.param("compiled", marks=pytest.mark.slow)])
def test_after_the_warm_up_no_row_count_makes_onednn_compile_anything(
    tiny: Configs, write_model: Writer, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = load_engine(write_model(tiny(**WIDTHS)), backends=(backend,))
    engine.warm_up(200)
    capfd.readouterr()
    with mkldnn.verbose(mkldnn.VERBOSE_ON_CREATION):  # type: ignore[no-untyped-call]
        for rows in range(1, 201):
            engine.run(torch.zeros(rows, 57), backend)
    told = capfd.readouterr().out
    assert "create:cache_hit" in told
    assert "create:cache_miss" not in told


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padded_rows_give_as_exact_results(tiny: Configs, write_model: Writer, dtype: str) -> None:
    engine = load_engine(write_model(tiny(**WIDTHS)), dtype=dtype)
    assert faults(engine, "fused", {65: 4, 71: 4, 129: 2, 257: 1}) == []


def test_padding_shows_neither_in_the_shape_nor_in_the_rows_given(tiny: Configs, write_model: Writer) -> None:
    engine = load_engine(write_model(tiny(**WIDTHS)))
    rows = torch.randn(65, 57)
    rows[64] = torch.nan
    kept = rows.clone()
    results = engine.run(rows, "fused")
    assert results.shape == (65, 83)
    assert results.is_contiguous()
    assert results[64].isnan().all()
    assert not results[:64].isnan().any()
    assert torch.equal(rows[:64], kept[:64])
