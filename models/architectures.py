"""Where each Hugging Face architecture keeps its feed-forward blocks, and what they compute: one row per architecture.

To add one, add a row to `ARCHITECTURES` and a case to tests/models/test_architectures.py, which compares it with the
`transformers` module. Nothing else knows an architecture by name.

Source: the modules and configurations of transformers 5.24, https://github.com/huggingface/transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from models.config import Activation, NormKind, NormPosition

# What transformers calls an activation, as far as it computes one of ours; it has several ways to write one function.
ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The feed-forward blocks of a `model_type`.

    Attributes:
        prefixes: what may stand before `layer` in a tensor's name; it differs between a bare model and one with a head.
        layer: what a layer is called there, N being its number.
        modules: ours, then theirs below the layer. A "pre_norm" is before the network, a "post_norm" behind it, and a
            "ffn.gate" makes it gated. Where gate and up name the same module, they are its two halves, gate first.
        norm: the kind of the norms.
        eps: the config's field for it, and the value where the field is missing.
        activation: likewise.
        activations: our name for each of that field's values.
        bias: whether the linear layers add one, or the field that says so; false where the field is missing.
        dim: the field with the width of the residual stream.
        hidden: the field with the width inside a block.
        hidden_factor: the width inside a block divided by `dim`, for configs without `hidden`; None: it is required.
        depth: the field with the number of layers.
        config: the field whose object holds all the others; None where they are at the top level.
        is_transposed: whether linear weights are stored as (in, out).
        norm_offset: what has to be added to a stored norm's weight.
        note: what a person should know about what is imported.
    """

    prefixes: tuple[str, ...]
    layer: str
    modules: Mapping[str, str]
    norm: NormKind
    eps: tuple[str, float]
    activation: tuple[str, str]
    activations: Mapping[str, Activation] = field(default_factory=lambda: ACTIVATIONS)
    bias: bool | str = False
    dim: str = "hidden_size"
    hidden: str = "intermediate_size"
    hidden_factor: int | None = None
    depth: str = "num_hidden_layers"
    config: str | None = None
    is_transposed: bool = False
    norm_offset: float = 0.0
    note: str | None = None

    @property
    def is_gated(self) -> bool:
        """Whether a block has a gate."""
        return "ffn.gate" in self.modules

    @property
    def is_packed(self) -> bool:
        """Whether gate and up are stored as one matrix."""
        return self.modules.get("ffn.gate") == self.modules["ffn.up"]

    @property
    def position(self) -> NormPosition:
        """Where the norms are."""
        if "post_norm" not in self.modules:
            return "pre"
        return "both" if "pre_norm" in self.modules else "post"


_LLAMA = Architecture(
    prefixes=("model.", ""),
    layer="layers.N.",
    modules={
        "pre_norm": "post_attention_layernorm",
        "ffn.gate": "mlp.gate_proj",
        "ffn.up": "mlp.up_proj",
        "ffn.down": "mlp.down_proj",
    },
    norm="rms",
    eps=("rms_norm_eps", 1e-6),
    activation=("hidden_act", "silu"),
)

# Published configs of the first Gemma say gelu and mean its tanh form; transformers reads them so.
_GEMMA = replace(
    _LLAMA,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    activations={**ACTIVATIONS, "gelu": "gelu_tanh"},
    norm_offset=1.0,
)

# hidden_act is in these configs too, and transformers does not look at it.
_GEMMA_2 = replace(
    _GEMMA,
    modules={
        **_GEMMA.modules,
        "pre_norm": "pre_feedforward_layernorm",
        "post_norm": "post_feedforward_layernorm",
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    activations=ACTIVATIONS,
)

_BERT = Architecture(
    prefixes=("bert.", ""),
    layer="encoder.layer.N.",
    modules={"ffn.up": "intermediate.dense", "ffn.down": "output.dense", "post_norm": "output.LayerNorm"},
    norm="layer",
    eps=("layer_norm_eps", 1e-12),
    activation=("hidden_act", "gelu"),
    bias=True,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "bert": _BERT,
    "gemma": _GEMMA,
    "gemma2": _GEMMA_2,
    "gemma3": replace(
        _GEMMA_2,
        prefixes=("language_model.model.", "model.language_model."),
        config="text_config",
        note="the blocks are those of the language model; the vision tower's are left out",
    ),
    "gemma3_text": _GEMMA_2,
    "gpt2": Architecture(
        prefixes=("transformer.", ""),
        layer="h.N.",
        modules={"pre_norm": "ln_2", "ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"},
        norm="layer",
        eps=("layer_norm_epsilon", 1e-5),
        activation=("activation_function", "gelu_new"),
        bias=True,
        dim="n_embd",
        hidden="n_inner",
        hidden_factor=4,
        depth="n_layer",
        is_transposed=True,
    ),
    "llama": replace(_LLAMA, bias="mlp_bias"),
    "mistral": _LLAMA,
    "phi3": replace(
        _LLAMA,
        modules={**_LLAMA.modules, "ffn.gate": "mlp.gate_up_proj", "ffn.up": "mlp.gate_up_proj"},
        eps=("rms_norm_eps", 1e-5),
    ),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "roberta": replace(_BERT, prefixes=("roberta.", "")),
    "t5": Architecture(
        prefixes=("", "transformer."),
        layer="encoder.block.N.layer.1.",
        modules={
            "pre_norm": "layer_norm",
            "ffn.gate": "DenseReluDense.wi_0",
            "ffn.up": "DenseReluDense.wi_1",
            "ffn.down": "DenseReluDense.wo",
        },
        norm="rms",
        eps=("layer_norm_epsilon", 1e-6),
        activation=("feed_forward_proj", "relu"),
        # T5 v1.1; what transformers reads as gated-gelu is its tanh form.
        activations={**{f"gated-{name}": ours for name, ours in ACTIVATIONS.items()}, "gated-gelu": "gelu_tanh"},
        dim="d_model",
        hidden="d_ff",
        depth="num_layers",
        note="the blocks are those of the encoder; the decoder's are left out",
    ),
    "vit": replace(
        _BERT,
        prefixes=("vit.", ""),
        modules={"pre_norm": "layernorm_after", "ffn.up": "intermediate.dense", "ffn.down": "output.dense"},
    ),
}
