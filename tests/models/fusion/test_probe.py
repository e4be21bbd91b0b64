"""A block that has the names of one that is known and computes something else is left alone."""

import pytest
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from models import fuse
from models.fusion.layers import OnCPU
from tests.models.fusion.made_blocks import MLP, config, reason_left_alone


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


@pytest.mark.parametrize("kind", [Scaled, Clipped])
def test_another_formula_under_known_names_is_seen(kind: type[LlamaMLP]) -> None:
    sentence = "its forward computes something else than its children's names and its activation tell"
    assert reason_left_alone(kind(config("LlamaConfig")).eval()) == sentence


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("__init__", "its weights cannot be laid out for the kernels: RuntimeError: out of luck"),
        ("hidden", "its fused form fails on three rows of noise with RuntimeError: out of luck"),
    ],
)
def test_a_block_whose_fused_form_fails_is_left_alone_and_the_others_are_told_of(
    method: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ModuleDict({"sound": MLP(), "at_fault": MLP(nn.ReLU())}).eval()
    own = getattr(OnCPU, method)

    def fail(self: OnCPU, *args: object) -> Tensor | None:
        if "relu" in (*args, getattr(self, "_activation", None)):
            raise RuntimeError("out of luck\nand more")
        result: Tensor | None = own(self, *args)
        return result

    monkeypatch.setattr(OnCPU, method, fail)
    report = fuse(model)
    assert [it.name for it in report.swapped] == ["sound"]
    assert [(it.name, it.reason) for it in report.left_alone] == [("at_fault", sentence)]
    assert type(model["at_fault"]) is MLP
