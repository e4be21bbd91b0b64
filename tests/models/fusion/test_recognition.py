"""What is no feed-forward block is not taken for one."""

import transformers

from models import fuse
from tests.models.fusion.made_blocks import config


def test_an_output_of_attention_is_no_feed_forward_block() -> None:
    fields = {"num_hidden_layers": 2, "vocab_size": 30}
    bert = transformers.BertModel(config("BertConfig", **fields)).eval()
    names = [f"encoder.layer.{layer}.{part}" for layer in range(2) for part in ("intermediate", "output")]
    assert [it.name for it in fuse(bert).swapped] == names
