"""What `python -m models bench` measures and says; no test relies on how long anything takes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import roof
from kernels.roof import Roof
from models import bench
from models.bench import Measurement
from models.engine import load_engine
from models.errors import BackendUnavailableError, InputError

CPU = torch.device("cpu")
ROOF = Roof(10e9, {torch.float32: 100e9})

pytestmark = pytest.mark.usefixtures("small_roof")


def measurement(rows: int, backend: str, median_us: float) -> Measurement:
    return Measurement(rows, backend, "torch", median_us, 1, 1, None, None, None, 1, 1, 1)


def test_a_round_times_every_pass_once_and_starts_with_another_each_time() -> None:
    order: list[str] = []
    passes = {name: (lambda name=name: order.append(name)) for name in "abc"}
    seconds = bench.rounds(passes, 3, CPU)
    assert "".join(order) == "aabbcc" + "bbccaa" + "ccaabb"  # an untimed pass goes before each timed one
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(time > 0 for times in seconds.values() for time in times)


def test_a_cold_pass_comes_after_a_write_in_place_of_an_untimed_pass() -> None:
    evict = torch.zeros(4, dtype=torch.uint8)
    seen: list[int] = []
    bench.rounds({"a": lambda: seen.append(int(evict[0]))}, 3, CPU, evict)
    assert seen == [0, 1, 0]


def test_the_least_bytes_are_the_weights_and_the_rows() -> None:
    engine = load_engine("digits", dtype="bfloat16", backends=("eager",))
    weights = sum(each.numel() for each in engine._backends["eager"].model.parameters())
    assert bench.moved_bytes(engine, 7) == 2 * (weights + 7 * (64 + 10))


def test_figures_follow_from_the_times() -> None:
    engine = load_engine("digits", backends=("eager", "fused"))
    seconds = {"eager": [4e-3, 6e-3, 8e-3], "fused": [2e-3, 2e-3, 2e-3]}
    found = bench._measurement(engine, 5, "fused", seconds, ROOF)
    flops, n_bytes = 5 * engine.config.flops_per_row, bench.moved_bytes(engine, 5)
    assert (found.median_us, found.ratio, found.ratio_q1, found.ratio_q3) == pytest.approx((2000, 3, 2.5, 3.5))
    assert found.gb_s == pytest.approx(n_bytes / 2e-3 / 1e9)
    assert found.tflop_s == pytest.approx(flops / 2e-3 / 1e12)
    assert found.percent_of_roof == pytest.approx(100 * max(n_bytes / 10e9, flops / 100e9) / 2e-3)
    assert found.implementation == "onednn"


def test_there_is_no_ratio_where_eager_is_not_measured() -> None:
    engine = load_engine("digits", backends=("fused",))
    (found,) = bench.bench(engine, [2], ROOF, repetitions=1)
    assert found.ratio is found.ratio_q1 is found.ratio_q3 is None
    assert bench.geometric_means([found]) == {}
    assert " 2  fused " in bench.table([found])


def test_geometric_means_are_over_row_counts() -> None:
    found = [
        *(measurement(1, "eager", 80), measurement(1, "fused", 10)),
        *(measurement(8, "eager", 80), measurement(8, "fused", 40)),
    ]
    assert bench.geometric_means(found) == {"fused": pytest.approx(4)}
    assert bench.geometric_means(found, against="fused") == {"eager": pytest.approx(0.25)}


def test_fused_is_put_beside_compiled_and_a_tie_is_called_one() -> None:
    engine = load_engine("digits", backends=("eager", "fused"))
    seconds = {"compiled": [3e-3, 4e-3, 5e-3], "fused": [2e-3, 2e-3, 2e-3]}
    ahead = bench._measurement(engine, 1, "fused", seconds, ROOF)
    assert ahead.compiled_ratio == pytest.approx(2)
    assert ahead.ratio is None
    even = bench._measurement(engine, 16, "fused", seconds | {"compiled": [1e-3, 2e-3, 3e-3]}, ROOF)
    assert bench.against_compiled([measurement(1, "eager", 1), ahead, even]) == (
        "compiled's time over fused's: 2.00 (1.75 .. 2.25) at 1 row; 1.00 (0.75 .. 1.25, a tie) at 16 rows"
    )
    assert bench.against_compiled([measurement(1, "eager", 1), measurement(1, "fused", 1)]) is None


def test_quartiles_of_few_values() -> None:
    assert bench.quartiles([3.0]) == (3, 3, 3)
    assert bench.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)


@pytest.mark.parametrize(("rows", "repetitions"), [([], 1), ([0], 1), ([1], 0)])
def test_nothing_is_timed_no_times(rows: list[int], repetitions: int) -> None:
    with pytest.raises(InputError, match="expected positive integers"):
        bench.bench(load_engine("digits"), rows, ROOF, repetitions)


def test_a_backend_that_cannot_run_stops_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.backends.fused.unavailable", lambda _: "no post-ops here")
    with pytest.raises(BackendUnavailableError, match="no post-ops here"):
        bench.bench(load_engine("digits"), [1], ROOF)


def test_a_roof_is_measured_with_the_models_own_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, shapes = load_engine("digits", backends=("eager",)), []

    def products(*args: Any) -> Iterator[Callable[[], object]]:
        shapes.append(args[:3])
        return genuine(*args)

    genuine = roof._products
    monkeypatch.setattr(roof, "_products", products)
    found = bench.measure_roof(engine, [1, 300])
    dim, hidden = engine.config.dim, engine.config.hidden
    assert shapes == [(16, 16, 16), (300, dim, hidden), (300, hidden, dim)]
    assert found.bytes_per_s > 0
    assert list(found.flops_per_s) == [torch.float32]


def test_what_is_beyond_the_roof_is_told_below_the_table() -> None:
    within, beyond = (replace(measurement(1, "fused", 80), percent_of_roof=each) for each in (100, 130))
    assert "beyond" not in bench.table([within])
    assert bench.table([within, beyond]).splitlines()[-1].startswith("1 of 2 are beyond 100% of the roof, up to 130%: ")
