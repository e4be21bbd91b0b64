"""A block that has the names of one that is known and computes something else is left alone."""

import pytest
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.models.fusion.made_blocks import config, reason_left_alone


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
