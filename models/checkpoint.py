"""Turns the feed-forward blocks of a Hugging Face checkpoint into a model directory.

models/architectures.py says what each architecture calls its parts. Everything that a config, an index and the headers
of the weights files can tell is checked before the first number is read.

Weights files are memory-mapped, one at a time, and only one tensor at a time takes memory besides. So an import's
resident memory is that of one shard, not of the model; with a single unsharded file it is that of all the blocks that
are read. Most of it is the file's own pages, which the system reclaims when memory is short. A file larger than memory
and swap together is refused, since Linux with its default settings does not map it.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from models import weights
from models.architectures import ARCHITECTURES, Architecture
from models.config import (
    CONFIG_FILE,
    MAX_DEPTH,
    MAX_WIDTH,
    FFNConfig,
    ModelConfig,
    NormConfig,
    bounded_text,
    parsed_json,
    shown_name,
)
from models.errors import ConfigError, ImportSourceError, shown
from models.weights import FLOAT_TYPES, WEIGHTS_FILE

INDEX_FILE = f"{WEIGHTS_FILE}.index.json"

# Checkpoints of before 2019 call a LayerNorm's two tensors by other names.
_SUFFIXES = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}
_QUANTISED = "quantised checkpoints are not supported: take the one it was made from"
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a tensor of ours is stored: a file, a name in it, and which half of its rows, if not all."""

    path: Path
    name: str
    half: int | None = None


class Checkpoint:
    """The feed-forward blocks of a Hugging Face model directory, whose numbers stay on disk until asked for.

    A block is the network with its norms and the residual: mostly x + FFN(norm(x)), where x is the output of the
    layer's attention.

    Args:
        source: a directory with config.json, and model.safetensors or its shards and model.safetensors.index.json.
        name: of the new model.
        layers: the first one and the one after the last; None: the end of the stack on that side.

    Attributes:
        config: of the new model.
        layout: the type, as safetensors calls it, and the shape of each of its tensors, in order of use.
        note: what a person should know about what is taken; None for nothing.

    Raises:
        ImportSourceError: an architecture, an activation or a file format that is not supported, a tensor that is
            missing or of a wrong shape or type, a layer that does not exist.
        ConfigError: `name` cannot be the name of a model, or the sizes make a model too large to be meant.
    """

    def __init__(self, source: Path, name: str, layers: tuple[int | None, int | None] = (None, None)) -> None:
        path = source / CONFIG_FILE
        self._architecture, fields = _architecture(path)
        start, stop = _layer_range(layers, _size(path, fields, self._architecture.depth, MAX_DEPTH))
        self.config = _config(path, self._architecture, fields, name, stop - start)
        self.note = self._architecture.note
        self._origins = _origins(source, self._architecture, self.config, start)
        self.layout = self._checked_layout()

    def tensors(self, progress: Callable[[int, int], None] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Read the tensors one after the other, in order of use; each is the caller's, who should not keep it.

        Types are the checkpoint's; a norm's weight to which the architecture adds 1 is float32 at least, since half
        precision would lose what is small beside it.

        Args:
            progress: told how many blocks of how many are read.

        Raises:
            ImportSourceError: a number is not finite, or the file has changed meanwhile.
        """
        per_block = len(self._origins) // self.config.depth
        for path, names in _runs(self._origins):
            with weights.opened(path, "pt", ImportSourceError) as file:
                for done, ours in names:
                    yield ours, self._read(file, ours)
                    if progress is not None and done % per_block == 0:
                        progress(done // per_block, self.config.depth)

    def _read(self, file: Any, ours: str) -> Tensor:
        origin = self._origins[ours]
        if origin.half is None:
            tensor: Tensor = file.get_tensor(origin.name)
        else:
            rows = self.config.hidden
            tensor = file.get_slice(origin.name)[origin.half * rows : (origin.half + 1) * rows]
        if not weights.is_finite(tensor):
            raise ImportSourceError(f"{origin.path}: {origin.name}: expected finite numbers, got NaN or infinity")
        if self._architecture.is_transposed and tensor.ndim == 2:
            tensor = tensor.T
        if self._is_offset(ours):
            tensor = tensor.to(weights.torch_types()[self.layout[ours][0]]) + self._architecture.norm_offset
        return tensor

    def _is_offset(self, ours: str) -> bool:
        return self._architecture.norm_offset != 0 and ours.endswith("norm.weight")

    def _checked_layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Compare the headers of the files with the config."""
        layout: dict[str, tuple[str, tuple[int, ...]]] = {}
        shapes = self.config.shapes()
        for path, names in _runs(self._origins):
            with weights.opened(path, "pt", ImportSourceError) as file:
                found = set(file.keys())
                for _, ours in names:
                    origin, shape = self._origins[ours], shapes[ours]
                    if origin.name not in found:
                        raise ImportSourceError(
                            f"{path}: {origin.name}: expected a tensor of this name, as {INDEX_FILE} says, got none"
                        )
                    stored = file.get_slice(origin.name)
                    kind, got = stored.get_dtype(), tuple(stored.get_shape())
                    if kind not in FLOAT_TYPES:
                        raise ImportSourceError(
                            f"{path}: {origin.name}: expected one of the types {', '.join(FLOAT_TYPES)}, got {kind}; "
                            f"{_QUANTISED}"
                        )
                    expected = shape
                    if origin.half is not None:
                        expected = (2 * shape[0], *shape[1:])
                    elif self._architecture.is_transposed and len(shape) == 2:
                        expected = shape[::-1]
                    if got != expected:
                        raise ImportSourceError(f"{path}: {origin.name}: expected shape {expected}, got {got}")
                    layout[ours] = ("F64" if kind == "F64" else "F32") if self._is_offset(ours) else kind, shape
        return layout


def _json(path: Path, missing: str) -> dict[str, Any]:
    data = parsed_json(bounded_text(path, ImportSourceError, missing), str(path), ImportSourceError)
    if not isinstance(data, dict):
        raise ImportSourceError(f"{path}: expected a JSON object, got {shown(data)}")
    return data


def _architecture(path: Path) -> tuple[Architecture, dict[str, Any]]:
    """Read the foreign config.json; return its row, and the object that holds the sizes."""
    fields = _json(
        path,
        f"expected a Hugging Face model directory on this host, with {CONFIG_FILE} and {WEIGHTS_FILE}; nothing is "
        "downloaded by name",
    )
    found = fields.get("model_type")
    known = ", ".join(sorted(ARCHITECTURES))
    _refuse_experts(path, fields, known)
    row = ARCHITECTURES.get(found) if isinstance(found, str) else None
    if row is None:
        raise ImportSourceError(
            f"{path}: model_type: expected one of the supported architectures {known}, got {shown(found)}"
        )
    _refuse_quantised(path, fields)
    if row.config is not None:
        inner = fields.get(row.config)
        if not isinstance(inner, dict):
            raise ImportSourceError(f"{path}: {row.config}: expected an object, got {shown(inner)}")
        fields = inner
        _refuse_experts(path, fields, known)
        _refuse_quantised(path, fields)
    return row, fields


def _refuse_experts(path: Path, fields: Mapping[str, Any], known: str) -> None:
    key = next((it for it in _EXPERTS if fields.get(it) not in (None, 0, 1)), None)
    if key is not None:
        raise ImportSourceError(
            f"{path}: {key}: expected one feed-forward network a layer, got a mixture of {shown(fields[key])} experts "
            f"({shown(fields.get('model_type'))}); supported are the dense architectures {known}"
        )


def _refuse_quantised(path: Path, fields: Mapping[str, Any]) -> None:
    found = fields.get("quantization_config") or fields.get("compression_config")
    if found:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise ImportSourceError(
            f"{path}: quantization_config: expected weights in {', '.join(FLOAT_TYPES)}, got a checkpoint quantised by "
            f"{shown(method)}, which is not supported: take the one it was made from"
        )


def _config(path: Path, row: Architecture, fields: Mapping[str, Any], name: str, depth: int) -> ModelConfig:
    dim = _size(path, fields, row.dim, MAX_WIDTH)
    is_derived = row.hidden_factor is not None and fields.get(row.hidden) is None
    hidden = dim * (row.hidden_factor or 1) if is_derived else _size(path, fields, row.hidden, MAX_WIDTH)
    act = _field(fields, row.activation)
    if not isinstance(act, str) or act not in row.activations:
        raise ImportSourceError(
            f"{path}: {row.activation[0]}: expected one of {', '.join(row.activations)}, got {shown(act)}"
        )
    bias = _field(fields, (row.bias, False)) if isinstance(row.bias, str) else row.bias
    if not isinstance(bias, bool):
        raise ImportSourceError(f"{path}: {row.bias}: expected true or false, got {shown(bias)}")
    eps = _field(fields, row.eps)
    try:
        norm = NormConfig(kind=row.norm, position=row.position, eps=eps)
    except ConfigError:
        raise ImportSourceError(
            f"{path}: {row.eps[0]}: expected a number above 0 and at most 1, got {shown(eps)}"
        ) from None
    ffn = FFNConfig(gated=row.is_gated, activation=row.activations[act], bias=bias)
    return ModelConfig(name=name, dim=dim, hidden=hidden, depth=depth, ffn=ffn, norm=norm)


def _field(fields: Mapping[str, Any], field: tuple[str, Any]) -> Any:
    value = fields.get(field[0])
    return field[1] if value is None else value


def _size(path: Path, fields: Mapping[str, Any], key: str, high: int) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
        raise ImportSourceError(f"{path}: {key}: expected a positive integer up to {high:,}, got {shown(value)}")
    return value


def _layer_range(layers: tuple[int | None, int | None], count: int) -> tuple[int, int]:
    start = 0 if layers[0] is None else layers[0]
    stop = count if layers[1] is None else layers[1]
    if not 0 <= start < stop <= count:
        raise ImportSourceError(f"layers: expected A:B with 0 <= A < B <= {count}, got {start}:{stop}")
    return start, stop


def _origins(source: Path, row: Architecture, config: ModelConfig, start: int) -> dict[str, _Origin]:
    """Find the file and the name of every tensor."""
    listing, files = _files(source)
    layer = row.layer.partition("N")[0]
    prefix = next((it for it in row.prefixes if any(name.startswith(it + layer) for name in files)), None)
    if prefix is None:
        expected = " or ".join(f"{it}{row.layer}*" for it in row.prefixes)
        raise ImportSourceError(
            f"{listing}: expected tensors named {expected}, N being a layer's number, got "
            f"{shown(min(files, default=None))}"
        )
    origins: dict[str, _Origin] = {}
    shapes = config.shapes()
    names = sorted(files)
    for ours in shapes:
        _, block, rest = ours.split(".", 2)
        module, _, kind = rest.rpartition(".")
        theirs = f"{prefix}{row.layer.replace('N', str(start + int(block)))}{row.modules[module]}"
        wanted = [f"{theirs}.{suffix}" for suffix in _SUFFIXES[kind]]
        name = next((it for it in wanted if it in files), None)
        beside = _others(theirs, names)
        if name is None:
            got = f"{shown_name(beside[0])}; {_QUANTISED}" if beside else "none"
            raise ImportSourceError(f"{listing}: {wanted[0]}: expected a tensor of this name, got {got}")
        if beside:
            raise ImportSourceError(
                f"{listing}: {theirs}: expected a weight and at most a bias, got {shown_name(beside[0])} as well; "
                f"{_QUANTISED}"
            )
        half = ("ffn.gate", "ffn.up").index(module) if row.is_packed and module in ("ffn.gate", "ffn.up") else None
        origins[ours] = _Origin(files[name], name, half)
        if f"{ours.rpartition('.')[0]}.bias" not in shapes and f"{theirs}.bias" in files:
            raise ImportSourceError(
                f"{listing}: {theirs}.bias: expected no such tensor, since the config makes this a module without a "
                "bias"
            )
    return origins


def _others(theirs: str, names: Sequence[str]) -> list[str]:
    """Return what a module holds besides weight and bias, such as scales or packed numbers; the names are sorted."""
    known = {f"{theirs}.{it}" for them in _SUFFIXES.values() for it in them}
    start, end = bisect_left(names, f"{theirs}."), bisect_left(names, f"{theirs}/")  # "/" comes next after "."
    return [it for it in names[start:end] if it not in known]


def _files(source: Path) -> tuple[Path, dict[str, Path]]:
    """Return the file that lists the tensors, and where each of them is."""
    path, index = source / WEIGHTS_FILE, source / INDEX_FILE
    if path.exists():
        with weights.opened(path, "pt", ImportSourceError) as file:
            return path, dict.fromkeys(file.keys(), path)
    weights.refuse_broken_link(path, ImportSourceError)
    if index.exists():
        return index, _shards(index)
    weights.refuse_pickles(source, ImportSourceError)
    raise ImportSourceError(f"{path}: no such file; expected the weights in {WEIGHTS_FILE}, or {INDEX_FILE} and shards")


def _shards(index: Path) -> dict[str, Path]:
    found = _json(index, "expected the list of shards").get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ImportSourceError(f"{index}: weight_map: expected an object of tensor names and shards, got none")
    for shard in dict.fromkeys(it if isinstance(it, str) else shown(it) for it in found.values()):
        # Anything but a plain name could lead out of the directory.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}", shard):
            raise ImportSourceError(
                f"{index}: weight_map: expected plain file names in the same directory, got {shown(shard)}"
            )
        if not shard.endswith(".safetensors"):
            raise ImportSourceError(
                f"{index}: weight_map: expected shards named *.safetensors, got {shown(shard)}; nothing else is read"
            )
        if not (index.parent / shard).exists():
            raise ImportSourceError(f"{index.parent / shard}: no such file, though {INDEX_FILE} lists it")
    return {name: index.parent / shard for name, shard in found.items()}


def _runs(origins: Mapping[str, _Origin]) -> Iterator[tuple[Path, list[tuple[int, str]]]]:
    """Group neighbours in the same file, each group with the number of tensors done after it."""
    path: Path | None = None
    names: list[tuple[int, str]] = []
    for done, (ours, origin) in enumerate(origins.items(), start=1):
        if path is not None and origin.path != path:
            yield path, names
            names = []
        path = origin.path
        names.append((done, ours))
    if path is not None:
        yield path, names
