"""What is no feed-forward block is not taken for one, and what looks like one is named."""

import transformers
from torch import nn

from models import fuse
from tests.models.fusion.made_blocks import DIM, HIDDEN, config, reason_left_alone


class MoEBlock(nn.Module):
    """No block that is known."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 2)


def test_an_output_of_attention_is_no_feed_forward_block() -> None:
    fields = {"num_hidden_layers": 2, "vocab_size": 30}
    bert = transformers.BertModel(config("BertConfig", **fields)).eval()
    names = [f"encoder.layer.{layer}.{part}" for layer in range(2) for part in ("intermediate", "output")]
    assert [it.name for it in fuse(bert).swapped] == names


def test_what_looks_like_a_block_and_has_an_unknown_form_is_named() -> None:
    assert reason_left_alone(MoEBlock()) == "its form is unknown: no known one has the children it has, router"


def test_a_layer_of_pytorch_says_that_its_block_is_no_module() -> None:
    layer = nn.TransformerEncoderLayer(DIM, 2, HIDDEN).eval()
    expected = "its feed-forward block is no module of its own, but a part of the layer's forward"
    assert reason_left_alone(layer) == expected
