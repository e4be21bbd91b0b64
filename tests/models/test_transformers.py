"""Every backend against modules nobody here wrote: those of transformers, exact in float64.

Their weights are put into a model directory by hand. The blocks here add the residual; so does the comparison, where
the foreign module does not do it itself.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kernels.numerics import disagreement
from models import backends, weights
from models.backends import NAMES, fused_cuda
from models.backends.fused_cuda import FusedOnCUDA
from models.config import FFNConfig, InitConfig, ModelConfig, NormConfig
from models.engine import load_engine

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

DIM, HIDDEN, ROWS = 72, 200, 33


@dataclass(frozen=True)
class Case:
    """A foreign module, the config of the block that computes the same, and where its weights go.

    Attributes:
        forward: the module on the residual stream, its result with the residual added.
        names: each tensor of the block, by the foreign name of it.
    """

    module: nn.Module
    forward: Callable[[nn.Module, Tensor], Tensor]
    ffn: FFNConfig
    names: Mapping[str, str]
    norm: NormConfig = field(default_factory=lambda: NormConfig("none"))
    is_transposed: bool = False


def add(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return x + y


def llama(bias: bool) -> Case:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

    config = LlamaConfig(hidden_size=DIM, intermediate_size=HIDDEN, num_attention_heads=4, mlp_bias=bias)
    module = LlamaMLP(config)
    kinds = ("weight", "bias") if bias else ("weight",)
    names = {f"{name}_proj.{kind}": f"ffn.{name}.{kind}" for name in ("gate", "up", "down") for kind in kinds}
    return Case(module, add, FFNConfig(True, "silu", bias), names)


def normed_llama() -> Case:
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

    config = LlamaConfig(hidden_size=DIM, intermediate_size=HIDDEN, num_attention_heads=4)
    module = nn.Sequential(LlamaRMSNorm(DIM, config.rms_norm_eps), LlamaMLP(config))
    names = {f"1.{name}_proj.weight": f"ffn.{name}.weight" for name in ("gate", "up", "down")}
    norm = NormConfig("rms", "pre", config.rms_norm_eps)
    return Case(module, add, FFNConfig(True, "silu"), {**names, "0.weight": "pre_norm.weight"}, norm)


def gemma() -> Case:
    from transformers.models.gemma.modeling_gemma import GemmaConfig, GemmaMLP

    module = GemmaMLP(GemmaConfig(hidden_size=DIM, intermediate_size=HIDDEN, hidden_act="gelu_pytorch_tanh"))
    names = {f"{name}_proj.weight": f"ffn.{name}.weight" for name in ("gate", "up", "down")}
    return Case(module, add, FFNConfig(True, "gelu_tanh"), names)


def bert() -> Case:
    from transformers.models.bert.modeling_bert import BertConfig, BertIntermediate, BertOutput

    config = BertConfig(hidden_size=DIM, intermediate_size=HIDDEN, hidden_act="gelu", num_attention_heads=4)
    module = nn.ModuleDict({"intermediate": BertIntermediate(config), "output": BertOutput(config)})

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(module, nn.ModuleDict)
        y: Tensor = module["output"](module["intermediate"](x), x)
        return y

    names = {
        "intermediate.dense.weight": "ffn.up.weight",
        "intermediate.dense.bias": "ffn.up.bias",
        "output.dense.weight": "ffn.down.weight",
        "output.dense.bias": "ffn.down.bias",
        "output.LayerNorm.weight": "post_norm.weight",
        "output.LayerNorm.bias": "post_norm.bias",
    }
    norm = NormConfig("layer", "post", config.layer_norm_eps)
    return Case(module, forward, FFNConfig(False, "gelu", bias=True), names, norm)


def gpt2() -> Case:
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Config

    module = GPT2MLP(HIDDEN, GPT2Config(n_embd=DIM, n_head=4, activation_function="gelu_new"))
    names = {
        "c_fc.weight": "ffn.up.weight",
        "c_fc.bias": "ffn.up.bias",
        "c_proj.weight": "ffn.down.weight",
        "c_proj.bias": "ffn.down.bias",
    }
    return Case(module, add, FFNConfig(False, "gelu_tanh", bias=True), names, is_transposed=True)


def t5() -> Case:
    from transformers.models.t5.modeling_t5 import T5Config, T5DenseGatedActDense

    module = T5DenseGatedActDense(T5Config(d_model=DIM, d_ff=HIDDEN, feed_forward_proj="gated-gelu"))
    names = {"wi_0.weight": "ffn.gate.weight", "wi_1.weight": "ffn.up.weight", "wo.weight": "ffn.down.weight"}
    return Case(module, add, FFNConfig(True, "gelu_tanh"), names)


CASES: dict[str, Callable[[], Case]] = {
    "LlamaMLP": lambda: llama(bias=False),
    "LlamaMLP with bias": lambda: llama(bias=True),
    "LlamaRMSNorm and LlamaMLP": normed_llama,
    "GemmaMLP": gemma,
    "BertIntermediate and BertOutput": bert,
    "GPT2MLP": gpt2,
    "T5DenseGatedActDense": t5,
}


def made(case: Case, dtype: torch.dtype) -> nn.Module:
    """Fill the foreign module with seeded numbers that `dtype` holds."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in case.module.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            offset = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(offset + scale * torch.randn(parameter.shape, generator=generator))
    return case.module.to(dtype).requires_grad_(False).eval()


def write(case: Case, module: nn.Module, directory: Path, changed: Callable[[dict[str, Tensor]], None]) -> Path:
    config = ModelConfig(
        *("foreign", DIM, HIDDEN, 1),
        ffn=case.ffn,
        norm=case.norm,
        init=InitConfig(0),
    )
    foreign = dict(module.state_dict())
    assert set(foreign) == set(case.names)
    tensors = {
        f"blocks.0.{name}": foreign[theirs].T if case.is_transposed and foreign[theirs].ndim == 2 else foreign[theirs]
        for theirs, name in case.names.items()
    }
    changed(tensors)
    config.save(directory)
    weights.save(directory, tensors)
    return directory


def fault(
    name: str, dtype: str, backend: str, directory: Path, changed: Callable[[dict[str, Tensor]], None] = lambda _: None
) -> str | None:
    """Apply the rule: `backend` against the module in float64, the module in `dtype` being eager."""
    case = CASES[name]()
    module = made(case, getattr(torch, dtype))
    engine = load_engine(write(case, module, directory, changed), dtype=dtype, backends=(backend,), threads=1)
    x = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1)).to(engine.dtype)
    with torch.inference_mode():
        eager, exact = case.forward(module, x), case.forward(copy.deepcopy(module).double(), x.double())
    return disagreement(engine.run(x, backend), eager, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [*NAMES[:1], pytest.param(NAMES[1], marks=pytest.mark.slow), *NAMES[2:]])
def test_it_computes_what_transformers_does(name: str, dtype: str, backend: str, tmp_path: Path) -> None:
    assert fault(name, dtype, backend, tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "is_folded"), [*((name, False) for name in CASES), ("LlamaRMSNorm and LlamaMLP", True)]
)
def test_the_plan_for_gpus_computes_what_transformers_does(
    name: str, is_folded: bool, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    monkeypatch.setitem(backends._PLANS["fused"], "cpu", f"{fused_cuda.__name__}:{FusedOnCUDA.__name__}")
    monkeypatch.setattr(FusedOnCUDA, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(FusedOnCUDA, "is_folded", lambda *_: is_folded)
    assert fault(name, dtype, "fused", tmp_path) is None


def swap(first: str, second: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[first], tensors[second] = tensors[second], tensors[first]

    return change


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("LlamaMLP", "ffn.gate.weight", "ffn.up.weight"),
        ("LlamaMLP with bias", "ffn.gate.bias", "ffn.up.bias"),
        ("BertIntermediate and BertOutput", "post_norm.weight", "post_norm.bias"),
    ],
)
def test_the_comparison_sees_two_tensors_swapped(name: str, first: str, second: str, tmp_path: Path) -> None:
    swapped = swap(f"blocks.0.{first}", f"blocks.0.{second}")
    assert fault(name, "bfloat16", "fused", tmp_path, swapped) is not None
