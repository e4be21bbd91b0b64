"""Batch invariance: by how much a row's result changes with the rows that it is computed with.

The order in which a product is summed depends on its shape, so a row's last bits may change with the batch that it is
in. Each row is computed alone, and in batches of several sizes, once from the first place of a batch on and once from
the last; every result is compared with the one computed alone, and with float64. The bound is the one by which every
backend is accepted: ``|it - exact| <= 2 |eager, alone - exact| + tiny`` (kernels/numerics.py).
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.dtypes import name_of
from kernels.numerics import disagreement
from kernels.output import four_digits
from models.bench import require_available
from models.engine import Engine
from models.errors import InputError

ROWS = 64  # compared at every batch size; each has as many numbers as the model is wide


class Difference(NamedTuple):
    """The largest difference of any number, and the largest relative to the largest exact number of its row."""

    absolute: float
    relative: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One backend at one batch size.

    Attributes:
        alone_from_exact: rows computed alone, against float64.
        batched_from_exact: rows computed in batches, against float64.
        batched_from_alone: rows computed in batches, against the same rows computed alone.
        fault: what breaks the bound; None where nothing does.
    """

    backend: str
    implementation: str
    dtype: str
    batch_rows: int
    rows: int
    alone_from_exact: Difference
    batched_from_exact: Difference
    batched_from_alone: Difference
    fault: str | None

    def to_dict(self) -> dict[str, object]:
        """Return what JSON holds, rounded to four significant digits."""
        return {
            key: {name: four_digits(value) for name, value in it._asdict().items()}
            if isinstance(it, Difference)
            else it
            for key, it in ((field, getattr(self, field)) for field in self.__dataclass_fields__)
        }


def measure(
    engine: Engine, batch_sizes: Sequence[int], progress: Callable[[int, int, str], None] | None = None
) -> list[Comparison]:
    """Compare every backend of `engine` with itself, row by row; warmed up before.

    Args:
        engine: eager among its backends, none unavailable.
        batch_sizes: rows of a batch, each at least 2; a batch of more than `ROWS` is filled up with others.
        progress: told the backends done, all backends, and which one is being compared.

    Raises:
        InputError: a batch size is below 2, or the engine has no eager backend.
        BackendUnavailableError: a backend cannot run here.
    """
    if not batch_sizes or min(batch_sizes) < 2:
        raise InputError(f"rows: expected batches of 2 rows or more, got {list(batch_sizes)}")
    if "eager" not in engine.backends:
        raise InputError(f"backends: expected eager among them, which sets the bound, got {', '.join(engine.backends)}")
    require_available(engine)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(max(ROWS, *batch_sizes), engine.config.width_in, generator=generator)
    drawn = drawn.to(engine.device, engine.dtype)
    rows = drawn[:ROWS]
    with torch.inference_mode():
        exact = copy.deepcopy(engine.runner("eager").model).double()(rows.double())
    eager = _in_batches(engine, rows, "eager", 1)
    products = 2 * engine.config.depth + 2  # up and down in each block, stem, head; each may round another way
    found = []
    for done, (name, status) in enumerate(engine.backends.items()):
        if progress is not None:
            progress(done, len(engine.backends), name)
        alone = eager if name == "eager" else _in_batches(engine, rows, name, 1)
        for size in batch_sizes:
            filled = drawn[: max(ROWS, size)]
            forward = _in_batches(engine, filled, name, size)[:ROWS]
            backward = _in_batches(engine, filled.flip(0), name, size).flip(0)[:ROWS]
            results = (alone, forward, backward)
            faults = (disagreement(each, eager, exact, roundings=products) for each in results)
            found.append(
                Comparison(
                    backend=name,
                    implementation=str(status.implementation),
                    dtype=name_of(engine.dtype),
                    batch_rows=size,
                    rows=ROWS,
                    alone_from_exact=_difference(alone, exact, exact),
                    batched_from_exact=_larger(*(_difference(each, exact, exact) for each in (forward, backward))),
                    batched_from_alone=_larger(*(_difference(each, alone, exact) for each in (forward, backward))),
                    fault=next((each for each in faults if each), None),
                )
            )
    return found


def table(comparisons: Sequence[Comparison]) -> str:
    """Lay the comparisons out as text: largest absolute and, in brackets, relative differences."""
    titles = ("alone, float64", "in a batch, float64", "in a batch, alone")
    lines = [
        f"{'dtype':9} {'backend':9} {'batch':>6}  {titles[0]:>21}  {titles[1]:>21}  {titles[2]:>21}  within the bound"
    ]
    for it in comparisons:
        shown = "  ".join(
            f"{f'{each.absolute:.2e} ({each.relative:.2e})':>21}"
            for each in (it.alone_from_exact, it.batched_from_exact, it.batched_from_alone)
        )
        lines.append(
            f"{it.dtype:9} {it.backend:9} {it.batch_rows:>6}  {shown}  {f'no: {it.fault}' if it.fault else 'yes'}"
        )
    return "\n".join(lines)


def _in_batches(engine: Engine, rows: Tensor, backend: str, size: int) -> Tensor:
    """Run rows in batches of `size`; the last one goes back as far as it has to, to be as large as the others."""
    result = torch.empty(len(rows), engine.config.width_out, dtype=engine.dtype, device=engine.device)
    for start in range(0, len(rows), size):
        begin = min(start, len(rows) - size)
        result[begin : begin + size] = engine.run(rows[begin : begin + size], backend)
    return result


def _difference(got: Tensor, expected: Tensor, exact: Tensor) -> Difference:
    apart = (got.double() - expected.double()).abs()
    return Difference(float(apart.max()), float((apart.amax(1) / exact.abs().amax(1)).max()))


def _larger(one: Difference, other: Difference) -> Difference:
    return Difference(max(one.absolute, other.absolute), max(one.relative, other.relative))
