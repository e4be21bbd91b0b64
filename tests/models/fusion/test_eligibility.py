"""What is left alone says why."""

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from models import fuse
from tests.models.fusion.made_blocks import DIM, HIDDEN, MLP, config, made

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


class Scaled(LlamaMLP):  # type: ignore[misc]
    """It looks like a LlamaMLP and is none."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = 1.01 * super().forward(x)
        return y


class Clipped(LlamaMLP):  # type: ignore[misc]
    """It is one as long as numbers are small."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x.clamp(-4, 4))
        return y


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


def patched() -> nn.Module:
    block = MLP()
    object.__setattr__(block, "forward", block.forward)
    return block


def mixed() -> nn.Module:
    block = MLP()
    block.fc2.double()
    return block


class MoEBlock(nn.Module):
    """No block that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)


ODD: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "training": (lambda: MLP().train(), "it is in training mode: call eval() first"),
    "scaled": (lambda: Scaled(config("LlamaConfig")), "its forward computes something else than"),
    "clipped": (lambda: Clipped(config("LlamaConfig")), "its forward computes something else than"),
    "activation": (lambda: MLP(nn.ELU()), "its activation, ELU, is none of gelu, gelu_tanh, silu, relu"),
    "quick gelu": (lambda: MLP(transformers.activations.QuickGELUActivation()), "its activation, QuickGELUActivation"),
    "quantised": (quantised, "fc2 is QuantLinear, not torch.nn.Linear: quantised, wrapped or of another kind"),
    "hooked": (hooked, "fc1 has a forward hook, which would not run"),
    "patched": (patched, "its forward was replaced on the object"),
    "mixed": (mixed, "its weights are not of one type on one device: fc1.weight is torch.float32 on cpu"),
    "float64": (lambda: MLP().double(), "its weights are torch.float64: there are kernels for torch.float32"),
    "meta": (lambda: MLP().to("meta"), "its weights are on meta: there are kernels for cpu, cuda"),
    "of PyTorch": (
        lambda: nn.TransformerEncoderLayer(DIM, 2, HIDDEN),
        "its feed-forward block is no module of its own, but a part of the layer's forward",
    ),
    "unknown": (MoEBlock, "its form is unknown: no known one has the children it has, router"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_left_alone_says_why(name: str) -> None:
    block, sentence = ODD[name][0](), ODD[name][1]
    if name != "training":
        block.eval()
    kind = type(block)
    report = fuse(nn.ModuleDict({"odd": block, "plain": made("timm")}))
    assert [it.name for it in report.swapped] == ["plain"]
    assert [(it.name, it.kind) for it in report.left_alone] == [("odd", kind.__name__)]
    assert report.left_alone[0].reason.startswith(sentence)
    assert f"odd ({kind.__name__}): left alone, {sentence}" in str(report)
    assert type(block) is kind


def test_an_activation_is_told_by_what_it_computes() -> None:
    found = [fuse(MLP(act).eval()).swapped[0].activation for act in (nn.GELU("tanh"), torch.relu, torch.nn.SiLU())]
    assert found == ["gelu_tanh", "relu", "silu"]
