"""Turns the feed-forward blocks of a Hugging Face checkpoint into a model directory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models import weights
from models.config import Activation, FFNConfig, ModelConfig, NormConfig
from models.errors import ConfigError, ImportSourceError
from models.weights import FLOAT_TYPES, WEIGHTS_FILE

ARCHITECTURES = ("bert",)

# What transformers calls an activation, as far as it is one of ours.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}

# Ours, then theirs below encoder.layer.N; checkpoints of before 2019 call a norm's two tensors by other names.
_BERT_TENSORS = {
    "ffn.up.weight": ("intermediate.dense.weight",),
    "ffn.up.bias": ("intermediate.dense.bias",),
    "ffn.down.weight": ("output.dense.weight",),
    "ffn.down.bias": ("output.dense.bias",),
    "post_norm.weight": ("output.LayerNorm.weight", "output.LayerNorm.gamma"),
    "post_norm.bias": ("output.LayerNorm.bias", "output.LayerNorm.beta"),
}
_BERT_PREFIXES = ("", "bert.")


def read_huggingface(
    source: Path,
    name: str,
    layers: tuple[int | None, int | None] = (None, None),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read the feed-forward blocks of a BERT-family model: post-norm, LayerNorm, classic.

    A block computes ``LayerNorm(x + output.dense(act(intermediate.dense(x))))``, x being what the layer's attention
    hands on. Only the tensors that are asked for are read from disk.

    Args:
        source: a directory with config.json and model.safetensors.
        name: of the new model.
        layers: the first one and the one behind the last; None is the end of the stack on that side.
        progress: told how many layers of how many are read.

    Returns:
        The config and the weights, in the dtype of the checkpoint, ready for ``ModelConfig.save`` and ``weights.save``.

    Raises:
        ImportSourceError: an architecture, an activation or a file format that is not supported, a tensor that is
            missing or of a wrong shape, a layer that does not exist, numbers that are not finite.
        ConfigError: `name` cannot be the name of a model.

    Source: Devlin et al. 2018, https://arxiv.org/abs/1810.04805; tensor names as in transformers' BertLayer.
    """
    path = source / "config.json"
    fields = _fields(path)
    start, stop = _layer_range(layers, _size(path, fields, "num_hidden_layers"))
    eps = fields.get("layer_norm_eps", 1e-12)
    act = fields.get("hidden_act", "gelu")
    if not isinstance(act, str) or act not in _ACTIVATIONS:
        raise ImportSourceError(f"{path}: hidden_act: expected one of {', '.join(_ACTIVATIONS)}, got {act!r}")
    try:
        norm = NormConfig(kind="layer", position="post", eps=eps)
    except ConfigError:
        raise ImportSourceError(
            f"{path}: layer_norm_eps: expected a number above 0 and at most 1, got {eps!r}"
        ) from None
    config = ModelConfig(
        name=name,
        dim=_size(path, fields, "hidden_size"),
        hidden=_size(path, fields, "intermediate_size"),
        depth=stop - start,
        ffn=FFNConfig(gated=False, activation=_ACTIVATIONS[act], bias=True),
        norm=norm,
    )
    return config, _bert_tensors(_weights_path(source), config, start, progress)


def _fields(path: Path) -> dict[str, Any]:
    """Read the foreign config.json and tell whether it is of a supported architecture."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ImportSourceError(
            f"{path}: no such file; expected a Hugging Face model directory with config.json and {WEIGHTS_FILE}"
        ) from None
    except OSError as error:
        raise ImportSourceError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):  # no JSON, no UTF-8, or nested without end
        raise ImportSourceError(f"{path}: expected a JSON object in UTF-8, got something else") from None
    if not isinstance(fields, dict):
        raise ImportSourceError(f"{path}: expected a JSON object in UTF-8, got something else")
    found = fields.get("model_type")
    if found not in ARCHITECTURES:
        raise ImportSourceError(
            f"{path}: model_type: expected one of the supported architectures {', '.join(ARCHITECTURES)}, got {found!r}"
        )
    return fields


def _size(path: Path, fields: dict[str, Any], key: str) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ImportSourceError(f"{path}: {key}: expected a positive integer, got {value!r}")
    return value


def _layer_range(layers: tuple[int | None, int | None], count: int) -> tuple[int, int]:
    start = 0 if layers[0] is None else layers[0]
    stop = count if layers[1] is None else layers[1]
    if not 0 <= start < stop <= count:
        raise ImportSourceError(f"layers: expected A:B with 0 <= A < B <= {count}, got {start}:{stop}")
    return start, stop


def _weights_path(source: Path) -> Path:
    path = source / WEIGHTS_FILE
    if path.exists():
        return path
    if (source / f"{WEIGHTS_FILE}.index.json").exists():
        raise ImportSourceError(
            f"{path}: no such file; the checkpoint is sharded, which is not supported: save it as one {WEIGHTS_FILE}"
        )
    pickles = sorted(it.name for it in source.glob("*") if it.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if pickles:
        raise ImportSourceError(
            f"{path}: no such file; {pickles[0]} is there, but pickles are not read since they can run code: convert "
            "it to safetensors first"
        )
    raise ImportSourceError(f"{path}: no such file; expected the weights in one {WEIGHTS_FILE}")


def _bert_tensors(
    path: Path, config: ModelConfig, start: int, progress: Callable[[int, int], None] | None
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    shapes = config.shapes()
    with weights.opened(path, "pt", ImportSourceError) as file:
        found = set(file.keys())
        prefix = next((it for it in _BERT_PREFIXES if any(name.startswith(f"{it}encoder.") for name in found)), None)
        if prefix is None:
            raise ImportSourceError(
                f"{path}: expected tensors named encoder.layer.N..., with or without bert. before it, got "
                f"{min(found, default='none')}"
            )
        for block in range(config.depth):
            for ours, theirs in _BERT_TENSORS.items():
                wanted = [f"{prefix}encoder.layer.{start + block}.{it}" for it in theirs]
                name = next((it for it in wanted if it in found), None)
                if name is None:
                    raise ImportSourceError(f"{path}: {wanted[0]}: expected a tensor of this name, got none")
                target = f"blocks.{block}.{ours}"
                tensors[target] = _tensor(path, file, name, shapes[target])
            if progress is not None:
                progress(block + 1, config.depth)
    return {name: tensors[name] for name in shapes}


def _tensor(path: Path, file: Any, name: str, shape: tuple[int, ...]) -> Tensor:
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != shape:
        raise ImportSourceError(f"{path}: {name}: expected shape {shape}, got {tuple(stored.get_shape())}")
    if stored.get_dtype() not in FLOAT_TYPES:
        raise ImportSourceError(
            f"{path}: {name}: expected one of the types {', '.join(FLOAT_TYPES)}, got {stored.get_dtype()}"
        )
    tensor: Tensor = file.get_tensor(name)
    if not torch.isfinite(tensor).all():
        raise ImportSourceError(f"{path}: {name}: expected finite numbers, got NaN or infinity")
    return tensor
