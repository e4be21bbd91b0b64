"""A row gives the same answer alone and in any batch, within the bound, on every backend."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.backends import NAMES
from models.batch_invariance import Comparison, measure, table
from models.config import ModelConfig
from models.engine import Engine, load_engine
from models.errors import BackendUnavailableError, InputError

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

SIZES = [2, 3, 17, 64, 100]
WIDTHS = {"in_features": 57, "out_features": 83, "dim": 72, "hidden": 121}
Make = Callable[..., Engine]
Spoil = Callable[[Tensor], Tensor]


@pytest.fixture
def make(tiny: Callable[..., ModelConfig], write_model: Callable[[ModelConfig], Path]) -> Make:
    return lambda *backends, dtype="float32": load_engine(write_model(tiny(**WIDTHS)), dtype=dtype, backends=backends)


def spoilt(engine: Engine, backend: str, spoil: Spoil) -> list[Comparison]:
    """Compare with a backend whose results in a batch are spoilt."""
    runner = engine._backends[backend]

    class Spoilt(type(runner)):  # type: ignore[misc]
        def __call__(self, x: Tensor) -> Tensor:
            result: Tensor = super().__call__(x)
            return result if len(x) == 1 else spoil(result.clone())

    runner.__class__ = Spoilt
    return [each for each in measure(engine, SIZES) if each.backend == backend]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", [name if name != "compiled" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])  # fmt: skip  # noqa: E501
def test_a_row_gives_the_same_answer_alone_and_in_any_batch(make: Make, backend: str, dtype: str) -> None:
    found = [each for each in measure(make("eager", backend, dtype=dtype), SIZES) if each.backend == backend]
    assert [(each.batch_rows, each.rows, each.dtype, each.fault) for each in found] == [
        (size, 64, dtype, None) for size in SIZES
    ]
    for each in found:
        errors = each.alone_from_exact.absolute + each.batched_from_exact.absolute
        assert each.batched_from_alone.absolute <= errors * (1 + 1e-6)


def first_place(result: Tensor) -> Tensor:
    result[0] += 0.01
    return result


def last_place(result: Tensor) -> Tensor:
    result[-1] += 0.01
    return result


def a_neighbour(result: Tensor) -> Tensor:
    return result + 1e-3 * result.roll(1, 0)


def not_a_number(result: Tensor) -> Tensor:
    result[-1, 0] = torch.nan
    return result


@pytest.mark.parametrize("backend", ["eager", "fused"])
@pytest.mark.parametrize("spoil", [first_place, last_place, a_neighbour, not_a_number], ids=lambda it: it.__name__)
def test_a_result_that_depends_on_its_place_or_its_neighbours_is_seen(make: Make, backend: str, spoil: Spoil) -> None:
    found = spoilt(make("eager", "fused"), backend, spoil)
    assert [each.batch_rows for each in found if each.fault] == SIZES
    assert table(found).count("  no: ") == len(SIZES)


def test_the_differences_are_the_largest_and_those_relative_to_the_row(make: Make) -> None:
    engine = make("eager")
    (clean,) = measure(engine, [64])

    def one_number(result: Tensor) -> Tensor:
        if len(result) == 64:
            result[5, 7] += 3.0
        return result

    (found,) = [each for each in spoilt(engine, "eager", one_number) if each.batch_rows == 64]
    assert found.alone_from_exact == clean.alone_from_exact
    assert found.batched_from_alone.absolute == pytest.approx(3.0, rel=1e-4)
    assert found.batched_from_exact.absolute == pytest.approx(3.0, rel=1e-4)
    rows = torch.randn(64, 57, generator=torch.Generator().manual_seed(0))
    largest = engine.run(rows, "eager").abs().amax(1)
    spoilt_rows = (largest[5], largest[63 - 5])  # in the batch as it comes, and in the one turned round
    assert found.batched_from_alone.relative == pytest.approx(float(3.0 / min(spoilt_rows)), rel=1e-4)


@pytest.mark.parametrize("sizes", [[], [1], [2, 0]])
def test_a_batch_has_two_rows_or_more(make: Make, sizes: list[int]) -> None:
    with pytest.raises(InputError, match="expected batches of 2 rows or more"):
        measure(make("eager"), sizes)


def test_the_bound_needs_eager_and_what_cannot_run_is_not_left_out(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="expected eager among them, which sets the bound, got fused"):
        measure(make("fused"), SIZES)
    monkeypatch.setattr("models.backends.fused.unavailable", lambda _: "no post-ops here")
    with pytest.raises(BackendUnavailableError, match="no post-ops here"):
        measure(make("eager", "fused"), SIZES)
