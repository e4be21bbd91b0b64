"""The whole model against float64, for every form it can take: ``|it - exact| <= 2 |eager - exact| + tiny``.

The rule is that of kernels/numerics.py, with a float32 rounding for each product that a row passes through, since each
may round another way.
Compilation takes seconds, so the compiled backend is shown a set of configs in which each choice occurs.
"""

import copy
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kernels.numerics import disagreement
from kernels.onednn import PackedLinear
from models.backends.fused import FusedOnCPU
from models.config import Activation, ModelConfig, NormKind, NormPosition
from models.engine import Engine, load_engine

Configs = Callable[..., ModelConfig]
Writer = Callable[[ModelConfig], Path]

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

# Row counts, and how often each is drawn: the largest of some thousand errors is telling, that of one row is luck.
DRAWS = {1: 30, 3: 10, 17: 2}
# Wide enough for the largest error to be typical, and no multiple of any tile.
WIDTHS = {"in_features": 57, "out_features": 83, "dim": 72, "hidden": 121}
CHOICES: dict[str, tuple[object, ...]] = {
    "activation": get_args(Activation),
    "gated": (True, False),
    "kind": get_args(NormKind),
    "position": get_args(NormPosition),
    "bias": (True, False),
}
FORMS = [
    {"activation": activation, "gated": gated, "kind": kind, "position": position, "bias": bias}
    for activation, gated, (kind, position), bias in itertools.product(
        get_args(Activation),
        (True, False),
        [*itertools.product(("rms", "layer"), get_args(NormPosition)), ("none", "pre")],
        (True, False),
    )
]
COMPILED_FORMS: list[tuple[str, dict[str, Any]]] = [
    ("float32", {"activation": "gelu_tanh", "gated": True, "kind": "rms", "position": "pre", "bias": False}),
    ("bfloat16", {"activation": "gelu_tanh", "gated": True, "kind": "layer", "position": "both", "bias": True}),
    ("float32", {"activation": "gelu", "gated": False, "kind": "layer", "position": "post", "bias": True}),
    ("bfloat16", {"activation": "silu", "gated": True, "kind": "rms", "position": "post", "bias": False}),
    ("float32", {"activation": "silu", "gated": True, "kind": "rms", "position": "both", "bias": True}),
    ("bfloat16", {"activation": "relu", "gated": False, "kind": "none", "position": "pre", "bias": False}),
]


def form(value: object) -> str | None:
    return "-".join(map(str, value.values())) if isinstance(value, dict) else None


def faults(engine: Engine, backend: str, row_draws: dict[int, int] = DRAWS) -> list[str]:
    """Return what the rule says of `backend` for each row count; exact are the engine's own weights in float64."""
    exact_model = copy.deepcopy(engine._backends["eager"].model).double()
    products = 2 * engine.config.depth + 2  # up and down in each block, stem, head
    generator = torch.Generator().manual_seed(0)
    found = []
    for count, draws in row_draws.items():
        rows = torch.randn(draws, count, engine.config.width_in, generator=generator).to(engine.device, engine.dtype)
        with torch.inference_mode():
            exact = exact_model(rows.double())
        got, eager = (torch.stack([engine.run(draw, name) for draw in rows]) for name in (backend, "eager"))
        problem = disagreement(got, eager, exact, roundings=products)
        if problem is not None:
            found.append(f"{count} rows: {problem}")
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("choices", FORMS, ids=form)
def test_fused_is_as_exact_as_eager(tiny: Configs, write_model: Writer, choices: dict[str, Any], dtype: str) -> None:
    engine = load_engine(write_model(tiny(**choices, **WIDTHS)), dtype=dtype)
    assert faults(engine, "fused") == []


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "choices"), COMPILED_FORMS, ids=form)
def test_compiled_is_as_exact_as_eager(tiny: Configs, write_model: Writer, choices: dict[str, Any], dtype: str) -> None:
    engine = load_engine(write_model(tiny(**choices, **WIDTHS)), dtype=dtype, backends=("eager", "compiled"))
    assert faults(engine, "compiled") == []


def absent(forms: Iterable[dict[str, Any]]) -> set[tuple[str, object]]:
    """Return each value of a choice that none of the forms makes."""
    made = {pair for choices in forms for pair in choices.items()}
    return {(choice, value) for choice, values in CHOICES.items() for value in values} - made


def test_each_choice_occurs_among_the_compiled_forms() -> None:
    assert absent(choices for _, choices in COMPILED_FORMS) == set()


def erf_for_tanh(fused: FusedOnCPU) -> None:
    for block in fused._blocks:
        block.activation = "gelu"


def gate_and_up_swapped(fused: FusedOnCPU) -> None:
    for block in fused._blocks:
        assert block.gate is not None
        block.gate, block.up = block.up, block.gate


def residual_dropped(fused: FusedOnCPU) -> None:
    class NoResidual(PackedLinear):
        __slots__ = ()  # the layout of PackedLinear, which the change of class asks for

        def add(self, x: Tensor, residual: Tensor) -> Tensor:  # noqa: ARG002
            return self(x)

    fused._blocks[-1].down.__class__ = NoResidual


def norm_dropped(fused: FusedOnCPU) -> None:
    fused._blocks[-1].pre_norm = torch.nn.Identity()


def block_dropped(fused: FusedOnCPU) -> None:
    fused._blocks.pop()


@pytest.mark.parametrize(
    "mutate",
    [erf_for_tanh, gate_and_up_swapped, residual_dropped, norm_dropped, block_dropped],
    ids=lambda it: it.__name__,
)
def test_the_rule_sees_a_mistake(tiny: Configs, write_model: Writer, mutate: Callable[[FusedOnCPU], None]) -> None:
    engine = load_engine(write_model(tiny(**WIDTHS)))
    assert faults(engine, "fused") == []
    fused = engine._backends["fused"]
    assert isinstance(fused, FusedOnCPU)
    mutate(fused)
    assert len(faults(engine, "fused")) == len(DRAWS)
