"""What the kernels cannot run is left alone and says why."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

from models import fuse
from tests.models.fusion.made_blocks import DIM, HIDDEN, MLP, reason_left_alone

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


class QuantLinear(nn.Linear):
    """What a quantiser would put in a linear layer's place."""


def quantised() -> nn.Module:
    block = MLP()
    block.fc2 = QuantLinear(HIDDEN, DIM)
    return block


def hooked() -> nn.Module:
    block = MLP()
    block.fc1.register_forward_hook(lambda *_: None)
    return block


def replaced() -> nn.Module:
    block = MLP()
    own = block.fc1.forward
    block.fc1.forward = lambda x: 2 * own(x)  # type: ignore[assignment, method-assign]
    return block


def mixed() -> nn.Module:
    block = MLP()
    block.fc2.double()
    return block


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "activation": (lambda: MLP(nn.ELU()), "its activation, ELU, is none of gelu, gelu_tanh, silu, relu"),
    "quick gelu": (lambda: MLP(transformers.activations.QuickGELUActivation()), "its activation, QuickGELUActivation"),
    "clipped": (
        lambda: MLP(transformers.activations.ClippedGELUActivation(-10, 10)),
        "its activation, ClippedGELUActivation, is none of",
    ),
    "quantised": (quantised, "fc2 is QuantLinear, not torch.nn.Linear: quantised, wrapped or of another kind"),
    "hooked": (hooked, "fc1 has a forward hook, which would not run"),
    "replaced": (replaced, "fc1's forward was replaced on the object, as accelerate does"),
    "mixed": (mixed, "its weights are not of one type on one device: fc1.weight is torch.float32 on cpu"),
    "float64": (lambda: MLP().double(), "its weights are torch.float64: there are kernels for torch.float32"),
    "meta": (lambda: MLP().to("meta"), "its weights are on meta: there are kernels for cpu, cuda"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_the_kernels_cannot_run_is_left_alone(name: str) -> None:
    block, sentence = ODD[name][0](), ODD[name][1]
    assert reason_left_alone(block.eval()).startswith(sentence)


def test_an_activation_is_told_by_what_it_computes() -> None:
    found = [fuse(MLP(act).eval()).swapped[0].activation for act in (nn.GELU("tanh"), torch.relu, torch.nn.SiLU())]
    assert found == ["gelu_tanh", "relu", "silu"]
