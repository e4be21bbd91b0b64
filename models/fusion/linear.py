"""The weights of a linear layer, whether its class stores them as (out, in) or (in, out)."""

from typing import cast

from torch import Tensor, nn

Pair = tuple[Tensor, Tensor | None]  # a weight, (out, in), and its bias


def pair_of(layer: nn.Module | None) -> Pair:
    """Return weight and bias of a linear layer, the weight as (out, in)."""
    weight, bias = cast("Tensor", layer.weight), cast("Tensor | None", layer.bias)  # type: ignore[union-attr]
    return (weight.detach().T if is_conv1d(layer) else weight.detach()), None if bias is None else bias.detach()


def halves(pair: Pair) -> tuple[Pair, Pair]:
    """Split two linear layers that are stored as one, the first one's rows above the second one's."""
    weights = pair[0].chunk(2)
    biases = (None, None) if pair[1] is None else pair[1].chunk(2)
    return (weights[0], biases[0]), (weights[1], biases[1])


def is_conv1d(layer: object) -> bool:
    """Tell whether this is GPT-2's linear layer, which stores its weight as (in, out)."""
    return type(layer).__name__ == "Conv1D" and isinstance(layer, nn.Module) and hasattr(layer, "nf")
