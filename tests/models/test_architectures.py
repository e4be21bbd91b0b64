"""Every architecture that can be imported, against the model of it that transformers has."""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from kernels.numerics import disagreement
from models import mlp, weights
from models.__main__ import main
from models.architectures import ACTIVATIONS, ARCHITECTURES
from models.checkpoint import Checkpoint
from models.engine import load_engine
from tests.models.imported import imported
from tests.models.test_transformers import swap

DIM, HIDDEN, LAYERS, ROWS = 24, 40, 3, 17

SIZES: dict[str, Any] = {
    "hidden_size": DIM,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 30,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Far from what any architecture has by itself, so that one that is not read shows.
    "rms_norm_eps": 1e-2,
    "layer_norm_eps": 1e-2,
}
IMAGE: dict[str, Any] = {"image_size": 28, "patch_size": 14}
GPT2: dict[str, Any] = {"n_embd": DIM, "n_layer": LAYERS, "n_head": 2, "vocab_size": 30, "n_positions": 32}
GPT2 |= {"layer_norm_epsilon": 1e-2}
T5: dict[str, Any] = {"d_model": DIM, "d_ff": HIDDEN, "d_kv": 12, "num_layers": LAYERS, "num_heads": 2}
T5 |= {"vocab_size": 30, "feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-2}


@dataclass(frozen=True)
class Case:
    """A model of transformers.

    Attributes:
        model: the name of its class, that of its config following from it.
        layers: where its layers are.
        block: what a layer's feed-forward block is, with norm and residual.
        fields: of the config.
        written: fields as an older file has them, put in place of what is written today.
    """

    model: str
    config: str
    layers: str
    block: Callable[[Any, Tensor], Tensor]
    fields: Mapping[str, Any] = field(default_factory=lambda: SIZES)
    written: Mapping[str, Any] = field(default_factory=dict)


def llama(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.mlp(layer.post_attention_layernorm(x))
    return x + y


def gemma2(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(x)))
    return x + y


def bert(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.output(layer.intermediate(x), x)
    return y


def gpt2(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.mlp(layer.ln_2(x))
    return x + y


def vit(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.mlp(layer.layernorm_after(x))
    return x + y


def t5(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = layer.layer[-1](x)
    return y


VISION = IMAGE | {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3 = {"text_config": SIZES, "vision_config": VISION}
CASES: dict[str, Case] = {
    "llama": Case("LlamaForCausalLM", "LlamaConfig", "model.layers", llama),
    "llama with bias": Case("LlamaForCausalLM", "LlamaConfig", "model.layers", llama, SIZES | {"mlp_bias": True}),
    "llama without a head": Case("LlamaModel", "LlamaConfig", "layers", llama),
    "mistral": Case("MistralForCausalLM", "MistralConfig", "model.layers", llama),
    "qwen2": Case("Qwen2ForCausalLM", "Qwen2Config", "model.layers", llama),
    "qwen3": Case("Qwen3ForCausalLM", "Qwen3Config", "model.layers", llama),
    "gemma": Case("GemmaForCausalLM", "GemmaConfig", "model.layers", llama),
    "gemma as first published": Case(
        "GemmaForCausalLM", "GemmaConfig", "model.layers", llama, written={"hidden_act": "gelu"}
    ),
    "gemma2": Case("Gemma2ForCausalLM", "Gemma2Config", "model.layers", gemma2),
    "gemma2 with the older field": Case(
        "Gemma2ForCausalLM", "Gemma2Config", "model.layers", gemma2, written={"hidden_act": "gelu"}
    ),
    "gemma3_text": Case("Gemma3ForCausalLM", "Gemma3TextConfig", "model.layers", gemma2),
    "gemma3": Case("Gemma3ForConditionalGeneration", "Gemma3Config", "model.language_model.layers", gemma2, GEMMA3),
    "phi3": Case("Phi3ForCausalLM", "Phi3Config", "model.layers", llama),
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", "transformer.h", gpt2, GPT2),
    "gpt2 of another width": Case("GPT2Model", "GPT2Config", "h", gpt2, GPT2 | {"n_inner": HIDDEN}),
    "bert": Case("BertForMaskedLM", "BertConfig", "bert.encoder.layer", bert),
    "roberta": Case("RobertaForMaskedLM", "RobertaConfig", "roberta.encoder.layer", bert),
    "roberta without a head": Case("RobertaModel", "RobertaConfig", "encoder.layer", bert),
    "vit": Case("ViTForImageClassification", "ViTConfig", "vit.layers", vit, SIZES | IMAGE),
    "t5": Case("T5ForConditionalGeneration", "T5Config", "encoder.block", t5, T5),
    "t5 encoder": Case("T5EncoderModel", "T5Config", "encoder.block", t5, T5),
}


def made(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """Make a model every number of which is away from its neutral value."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        model = getattr(transformers, case.model)(getattr(transformers, case.config)(**case.fields))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter += spread * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).requires_grad_(False).eval()


def write(case: Case, model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(case.written)))
    return directory


def blocks(case: Case, model: nn.Module, x: Tensor) -> Tensor:
    for layer in model.get_submodule(case.layers).children():
        x = case.block(layer, x)
    return x


def fault(name: str, dtype: str, directory: Path, changed: Callable[[dict[str, Tensor]], None] = lambda _: None) -> Any:
    """Apply the rule to what is imported, the model in `dtype` being eager and in float64 exact."""
    case = CASES[name]
    model = made(case, getattr(torch, dtype))
    config, tensors = imported(write(case, model, directory / "source"), "imported")
    changed(tensors)
    config.save(directory)
    weights.save(directory, tensors)
    engine = load_engine(directory, dtype=dtype, threads=1)
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(engine.dtype)
    with torch.inference_mode():
        eager, exact = blocks(case, model, x), blocks(case, copy.deepcopy(model).double(), x.double())
    found = {
        # The RMSNorm of transformers takes its mean in float32 whatever comes in: "exact" has a rounding of its own.
        backend: disagreement(engine.run(x, backend), eager, exact, roundings=4 * config.depth)
        for backend in ("eager", "fused")
    }
    return {backend: sentence for backend, sentence in found.items() if sentence is not None}


def computes(name: str) -> str | None:
    """Tell by its values which of our activations one of transformers is; None for none."""
    x = torch.cat([torch.linspace(-8, 8, 513), torch.tensor([-100.0, -20.0, 20.0, 100.0])])
    with torch.no_grad():
        y = transformers.activations.ACT2FN[name](x.clone())
    return next((ours for ours, it in mlp.ACTIVATIONS.items() if torch.allclose(y, it(x), rtol=0, atol=1e-5)), None)


# The last two are no functions but modules with weights of their own.
@pytest.mark.parametrize("name", sorted(set(transformers.activations.ACT2CLS) - {"prelu", "xielu"}))
def test_an_activation_of_transformers_is_read_as_what_it_computes(name: str) -> None:
    assert ACTIVATIONS.get(name) == computes(name)


@pytest.mark.parametrize("kind", [name for name, row in ARCHITECTURES.items() if row.config is None])
def test_every_activation_that_an_architecture_takes_is_read_as_transformers_reads_it(kind: str) -> None:
    row = ARCHITECTURES[kind]
    config = getattr(transformers, next(it.config for name, it in CASES.items() if name.split(" ")[0] == kind))
    field = "dense_act_fn" if kind == "t5" else row.activation[0]
    for theirs, ours in row.activations.items():
        read = getattr(config(**{row.activation[0]: theirs}), field)
        assert computes(read) == ours, theirs


def test_every_architecture_has_a_case() -> None:
    assert {name.split(" ")[0] for name in CASES} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_what_is_imported_computes_what_transformers_does(name: str, tmp_path: Path) -> None:
    assert fault(name, "float32", tmp_path) == {}


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_bfloat16_checkpoints_compute_what_transformers_does(name: str, tmp_path: Path) -> None:
    assert fault(name, "bfloat16", tmp_path) == {}


@pytest.mark.parametrize("name", CASES)
def test_shards_hold_what_one_file_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = made(case)
    config, tensors = imported(write(case, model, tmp_path / "single"), "m")
    sharded = write(case, model, tmp_path / "sharded", max_shard_size="12KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    found, others = imported(sharded, "m")
    assert found == config
    assert list(others) == list(tensors)
    assert all(torch.equal(others[it], tensor) for it, tensor in tensors.items())


def test_a_range_of_layers_is_picked_from_shards(tmp_path: Path) -> None:
    case = CASES["phi3"]
    source = write(case, made(case), tmp_path, max_shard_size="12KB")
    _, whole = imported(source, "m")
    config, part = imported(source, "m", (1, 3))
    assert config.depth == 2
    for name, tensor in part.items():
        _, block, rest = name.split(".", 2)
        assert torch.equal(tensor, whole[f"blocks.{int(block) + 1}.{rest}"])


def test_a_norm_that_counts_from_one_is_kept_in_float32(tmp_path: Path) -> None:
    case = CASES["gemma2"]
    model = made(case, torch.bfloat16)
    _, tensors = imported(write(case, model, tmp_path), "m")
    stored = model.model.layers[1].pre_feedforward_layernorm.weight
    assert torch.equal(tensors["blocks.1.pre_norm.weight"], stored.float() + 1)
    assert tensors["blocks.1.ffn.up.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "words"), [("t5", "of the encoder"), ("gemma3", "language model"), ("bert", None)])
def test_what_is_left_out_is_said(name: str, words: str | None, tmp_path: Path) -> None:
    note = Checkpoint(write(CASES[name], made(CASES[name]), tmp_path), "m").note
    assert note is None if words is None else words in str(note)


def test_the_command_imports_shards_and_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["t5"]
    source = write(case, made(case), tmp_path / "t5", max_shard_size="12KB")
    assert main(["import", str(source), str(tmp_path / "out"), "--layers", "1:"]) == 0
    assert "the decoder's are left out" in capsys.readouterr().out
    assert load_engine(tmp_path / "out").config.depth == LAYERS - 1


def test_a_refused_import_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES["llama"]
    model = made(case)
    model.model.layers[2].mlp.down_proj.weight[3, 4] = torch.nan
    source = write(case, model, tmp_path / "llama")
    assert main(["import", str(source), str(tmp_path / "out")]) == 2
    assert "layers.2.mlp.down_proj.weight: expected finite numbers, got NaN" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("phi3", "ffn.gate.weight", "ffn.up.weight"),
        ("gemma2", "pre_norm.weight", "post_norm.weight"),
        ("gpt2", "pre_norm.weight", "pre_norm.bias"),
    ],
)
def test_the_comparison_sees_two_tensors_swapped(name: str, first: str, second: str, tmp_path: Path) -> None:
    assert set(fault(name, "float32", tmp_path, swap(f"blocks.1.{first}", f"blocks.1.{second}"))) == {"eager", "fused"}
