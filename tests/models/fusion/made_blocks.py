"""Feed-forward blocks of models nobody here wrote, small and seeded."""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertIntermediate, BertOutput
from transformers.models.distilbert.modeling_distilbert import FFN
from transformers.models.gemma.modeling_gemma import GemmaMLP
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense
from transformers.models.vit.modeling_vit import ViTMLP

from models import fuse

# Large enough for oneDNN's own products: see plain_rows.
DIM, HIDDEN, ROWS = 288, 1024, 19


class Pair(nn.Module):
    """A layer of BERT without its attention."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.BertConfig(hidden_size=DIM, intermediate_size=HIDDEN, num_attention_heads=2)
        self.intermediate, self.output = BertIntermediate(config), BertOutput(config)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.output(self.intermediate(x), x)
        return y


class MLP(nn.Module):
    """What timm calls an MLP."""

    def __init__(self, act: object = None) -> None:
        super().__init__()
        self.fc1, self.act, self.drop = nn.Linear(DIM, HIDDEN), nn.GELU() if act is None else act, nn.Dropout()
        self.fc2 = nn.Linear(HIDDEN, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))  # type: ignore[operator]
        return y


def config(kind: str, **fields: Any) -> Any:
    sizes = {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_attention_heads": 2} | fields
    return getattr(transformers, kind)(**sizes)


def t5(act: str) -> Any:
    return transformers.T5Config(d_model=DIM, d_ff=HIDDEN, feed_forward_proj=act)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.SiLU(), nn.Dropout(), nn.Linear(HIDDEN, DIM, bias=False))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "LlamaMLP": lambda: LlamaMLP(config("LlamaConfig")),
    "LlamaMLP with bias": lambda: LlamaMLP(config("LlamaConfig", mlp_bias=True)),
    "GemmaMLP": lambda: GemmaMLP(config("GemmaConfig")),
    "Phi3MLP": lambda: Phi3MLP(config("Phi3Config", pad_token_id=0)),
    "T5DenseGatedActDense": lambda: T5DenseGatedActDense(t5("gated-gelu")),
    "T5DenseActDense": lambda: T5DenseActDense(t5("relu")),
    "GPT2MLP": lambda: GPT2MLP(HIDDEN, transformers.GPT2Config(n_embd=DIM, n_head=2)),
    "ViTMLP": lambda: ViTMLP(config("ViTConfig")),
    "DistilBERT": lambda: FFN(transformers.DistilBertConfig(dim=DIM, hidden_dim=HIDDEN, n_heads=2)),
    "BertIntermediate and BertOutput": Pair,
    "a sequence": sequence,
    "timm": MLP,
}


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    block = BLOCKS[name]()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter.copy_((parameter.ndim == 1) + scale * torch.randn(parameter.shape, generator=generator))
    return block.to(dtype).requires_grad_(False).eval()


def rows(dtype: torch.dtype = torch.float32, *shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, DIM), generator=torch.Generator().manual_seed(1)).to(dtype)


def reason_left_alone(block: nn.Module) -> str:
    """Fuse a model of which `block` is left alone and another one is not, and return the reason."""
    kind = type(block)
    report = fuse(nn.ModuleDict({"odd": block, "plain": made("timm")}))
    assert [it.name for it in report.swapped] == ["plain"]
    assert [(it.name, it.kind) for it in report.left_alone] == [("odd", kind.__name__)]
    assert type(block) is kind
    reason = report.left_alone[0].reason
    assert f"odd ({kind.__name__}): left alone, {reason}" in str(report)
    return reason
