"""The network against its formula written out by hand, in float64."""

import itertools
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from models.config import Activation, ModelConfig, NormKind, NormPosition
from models.mlp import ACTIVATIONS, MLP

Configs = Callable[..., ModelConfig]
Spread = Callable[[ModelConfig], dict[str, Tensor]]


def model_of(config: ModelConfig, tensors: dict[str, Tensor]) -> MLP:
    model = MLP(config).double()
    model.load_state_dict(tensors)
    return model


@pytest.mark.parametrize(
    ("gated", "kind", "position", "bias"),
    list(itertools.product([True, False], get_args(NormKind), get_args(NormPosition), [True, False])),
)
@pytest.mark.parametrize("ends", [True, False])
def test_tensor_names_and_shapes_are_those_the_config_gives(
    tiny: Configs, gated: bool, kind: NormKind, position: NormPosition, bias: bool, ends: bool
) -> None:
    widths = {} if ends else {"in_features": None, "out_features": None}
    config = tiny(gated=gated, kind=kind, position=position, bias=bias, **widths)
    model = MLP(config)
    assert {name: tuple(it.shape) for name, it in model.state_dict().items()} == config.shapes()
    assert sum(it.numel() for it in model.parameters()) == config.parameter_count


def test_activations_follow_their_formulas() -> None:
    x = torch.linspace(-6, 6, 241, dtype=torch.float64)
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    formulas = {
        "gelu": x * 0.5 * (1 + torch.erf(x / 2**0.5)),
        "gelu_tanh": x * 0.5 * (1 + tanh),
        "silu": x / (1 + torch.exp(-x)),
        "relu": x.clamp(min=0),
    }
    assert set(formulas) == set(ACTIVATIONS) == set(get_args(Activation))
    for name, act in ACTIVATIONS.items():
        torch.testing.assert_close(act(x), formulas[name], rtol=1e-12, atol=1e-12)
    assert (formulas["gelu"] - formulas["gelu_tanh"]).abs().max() > 1e-4  # two functions, and the test can tell


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", get_args(NormKind))
@pytest.mark.parametrize("position", get_args(NormPosition))
def test_the_forward_pass_is_the_formula(
    tiny: Configs, spread: Spread, gated: bool, kind: NormKind, position: NormPosition
) -> None:
    config = tiny(gated=gated, kind=kind, position=position, depth=2, eps=1e-3)
    t = {name: it.double() for name, it in spread(config).items()}
    rows = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        if kind == "none":
            return x
        if kind == "rms":
            return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * t[f"{name}.weight"]
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        return scaled * t[f"{name}.weight"] + t[f"{name}.bias"]

    def ffn(name: str, x: Tensor) -> Tensor:
        act = ACTIVATIONS["gelu_tanh"]
        h = act(linear(f"{name}.gate", x)) * linear(f"{name}.up", x) if gated else act(linear(f"{name}.up", x))
        return linear(f"{name}.down", h)

    x = linear("stem", rows)
    for i in range(2):
        block = f"blocks.{i}"
        if position == "pre":
            x = x + ffn(f"{block}.ffn", norm(f"{block}.pre_norm", x))
        elif position == "post":
            x = norm(f"{block}.post_norm", x + ffn(f"{block}.ffn", x))
        else:
            x = x + norm(f"{block}.post_norm", ffn(f"{block}.ffn", norm(f"{block}.pre_norm", x)))
    torch.testing.assert_close(model_of(config, t)(rows), linear("head", x), rtol=1e-10, atol=1e-10)


def test_without_stem_and_head_rows_keep_the_width_of_the_stream(tiny: Configs, spread: Spread) -> None:
    config = tiny(in_features=None, out_features=None)
    assert model_of(config, spread(config))(torch.zeros(2, 16, dtype=torch.float64)).shape == (2, 16)
