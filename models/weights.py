"""Reads, checks and writes model.safetensors; only `load`, `seeded` and `save` need torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from models.config import ModelConfig, nearest, parsed_json, shown_name
from models.control_group import memory_bytes
from models.errors import ModelError, WeightsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor, device, dtype

WEIGHTS_FILE = "model.safetensors"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
# A header of 4096 blocks with every bias and norm is 5 MiB. The library reads up to 100 MiB, and takes ten times that.
MAX_HEADER_BYTES = 2**23
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def check(directory: Path, config: ModelConfig) -> None:
    """Compare the header of `directory`/model.safetensors with `config`; the numbers themselves are not read.

    Without a weights file, a config with `init` is enough.

    Raises:
        WeightsError: the file is missing, foreign or truncated, or a tensor is missing, unexpected, of a wrong shape or
            of a dtype that is not a float; the sentence names file and tensor.
    """
    path = directory / WEIGHTS_FILE
    if not has_weights(directory, config):
        return
    with opened(path, "numpy") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, the file is no mapping
        expected = config.shapes()
        for name, shape in expected.items():
            if name not in found:
                raise WeightsError(f"{path}: {name}: expected shape {shape}, got no such tensor{nearest(name, found)}")
        for name, tensor in found.items():
            shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
            if name not in expected:
                raise WeightsError(
                    f"{path}: {shown_name(name)}: the config has no place for this tensor{nearest(name, expected)}"
                )
            if shape != expected[name]:
                raise WeightsError(f"{path}: {name}: expected shape {expected[name]}, got {shape}")
            if kind not in FLOAT_TYPES:
                raise WeightsError(f"{path}: {name}: expected one of the types {', '.join(FLOAT_TYPES)}, got {kind}")


def has_weights(directory: Path, config: ModelConfig) -> bool:
    """Tell whether the weights come from the file (true) or from ``config.init`` (false).

    Raises:
        WeightsError: there is neither.
    """
    path = directory / WEIGHTS_FILE
    if path.exists():
        return True
    refuse_broken_link(path, WeightsError)
    if config.init is not None:
        return False
    refuse_pickles(directory, WeightsError)
    raise WeightsError(f'{path}: no such file; add it, or "init": {{"seed": 0}} to the config for random weights')


def stored_types(directory: Path) -> tuple[str, ...]:
    """Return the types of the tensors in `directory`/model.safetensors, as the file calls them, each once and sorted.

    Raises:
        WeightsError: the file is missing, foreign or truncated.
    """
    with opened(directory / WEIGHTS_FILE, "numpy") as file:
        return tuple(sorted({file.get_slice(name).get_dtype() for name in file.keys()}))  # noqa: SIM118


def refuse_pickles(directory: Path, error: type[ModelError]) -> None:
    """Refuse a directory without a weights file that has a pickle instead.

    Raises:
        error: it has.
    """
    pickles = sorted(path.name for path in directory.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise error(
            f"{directory / WEIGHTS_FILE}: no such file; {shown_name(pickles[0])} is there, but pickles are not read "
            "since they can run code: convert it to safetensors first"
        )


def refuse_broken_link(path: Path, error: Callable[[str], Exception]) -> None:
    """Tell a link that leads nowhere from a file that is not there.

    Raises:
        Exception: what `error` makes, where it is one.
    """
    if path.is_symlink() and not path.exists():
        raise error(f"{path}: expected a file, got a link to {shown_name(path.readlink())}, where there is none")


def load(
    directory: Path,
    config: ModelConfig,
    dtype: dtype,
    device: device | str = "cpu",
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Tensor]:
    """Read the weights of `config`, or make them where it has `init` and `directory` has no weights file.

    Every number is checked before the first tensor takes memory or goes to the device, so a file with unusable numbers
    is refused at the cost of reading it. The second reading finds it in the page cache.

    Args:
        directory: where model.safetensors is.
        config: what the weights have to fit.
        dtype: what the tensors are converted to.
        device: where they are put.
        progress: told how many tensors are there so far.

    Returns:
        Every tensor of ``config.shapes()`` by its name.

    Raises:
        WeightsError: as `check`, and where a number is not finite, or is not finite any more in `dtype`.
    """
    check(directory, config)
    if not has_weights(directory, config):
        return {name: tensor.to(device, dtype) for name, tensor in seeded(config, progress).items()}
    path = directory / WEIGHTS_FILE
    with opened(path, "pt") as file:
        for name in config.shapes():
            _check_numbers(f"{path}: {name}", file.get_tensor(name), dtype)
    tensors: dict[str, Tensor] = {}
    with opened(path, "pt") as file:
        for name in config.shapes():
            tensors[name] = file.get_tensor(name).to(device, dtype)
            progress(len(tensors))
    return tensors


def is_finite(tensor: Tensor) -> bool:
    """Tell whether every number is finite.

    The smallest and the largest number decide it, in one pass and without a tensor of flags: 16 million numbers take
    about 2 ms on one Zen 4 core, where ``torch.isfinite(...).all()`` takes 80 to 140 ms.
    """
    low, high = tensor.aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())


def _check_numbers(name: str, tensor: Tensor, dtype: dtype) -> None:
    low, high = tensor.aminmax()  # NaN, where there is one
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise WeightsError(f"{name}: expected finite numbers, got NaN or infinity")
    largest = low.abs().maximum(high.abs())
    if not math.isfinite(largest.to(dtype).item()):
        raise WeightsError(f"{name}: its largest magnitude, {largest.item():g}, does not fit {dtype}")


def torch_types() -> dict[str, dtype]:
    """Return PyTorch's type of each of `FLOAT_TYPES`."""
    import torch

    return dict(zip(FLOAT_TYPES, (torch.float64, torch.float32, torch.float16, torch.bfloat16), strict=True))


def seeded(config: ModelConfig, progress: Callable[[int], None] = lambda _: None) -> dict[str, Tensor]:
    """Make random weights for `config`, float32, the same ones on every run.

    A matrix is uniform with variance 1 / fan-in, the down matrices with 1 / (2 depth fan-in), so that the residual
    stream keeps its scale at any depth. Biases are uniform within 1 / sqrt(dim). Norms start as the identity.

    Args:
        config: what the weights have to fit.
        progress: told how many tensors are there so far.

    Raises:
        ValueError: the config has no `init`.
        WeightsError: this machine's memory does not hold them.

    Source: Radford et al. 2019 (GPT-2), section 2.3, for the scale of what is added to the residual stream.
    """
    import torch

    if config.init is None:
        raise ValueError("seeded: expected a config with init, got one without")
    need, there = 4 * config.parameter_count, memory_bytes()
    if need > there:
        raise WeightsError(
            f"dim, hidden, depth: their {config.parameter_count:,} random numbers in float32 take "
            f"{need / 2**30:.1f} GiB, which is more than the {there / 2**30:.1f} GiB of this machine"
        )
    generator = torch.Generator().manual_seed(config.init.seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in config.shapes().items():
        tensor = torch.empty(shape)
        if "norm" in name:
            tensor.fill_(1.0 if name.endswith("weight") else 0.0)
        elif name.endswith("bias"):
            tensor.uniform_(-1 / math.sqrt(config.dim), 1 / math.sqrt(config.dim), generator=generator)
        else:
            variance = 1 / shape[1] / (2 * config.depth if name.endswith("ffn.down.weight") else 1)
            tensor.uniform_(-math.sqrt(3 * variance), math.sqrt(3 * variance), generator=generator)
        tensors[name] = tensor
        progress(len(tensors))
    return tensors


def save(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `directory`/model.safetensors; a file that was there is replaced only once the new one is whole.

    Raises:
        TypeError: a tensor is not of one of `FLOAT_TYPES`.
    """
    kinds = {dtype: kind for kind, dtype in torch_types().items()}
    for name, tensor in tensors.items():
        if tensor.dtype not in kinds:
            raise TypeError(f"save: {name} must be one of {', '.join(map(str, kinds))}, got {tensor.dtype}")
    layout = {name: (kinds[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    stream(directory, layout, tensors.items())


def stream(
    directory: Path, layout: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write `directory`/model.safetensors as `save` does, from tensors that need not be in memory together.

    Args:
        directory: where the file goes.
        layout: the type, one of `FLOAT_TYPES`, and the shape of each tensor.
        tensors: each tensor of `layout` once, in any order; none is held on to.

    Raises:
        ValueError: a tensor is not as `layout` says, is missing, or comes twice.

    Source: the format, https://huggingface.co/docs/safetensors; its own library needs all the tensors at once.
    """
    import torch

    types = torch_types()
    offsets: dict[str, int] = {}
    header: dict[str, Any] = {}
    end = 0
    # The widest types first, so that each tensor is aligned to its own.
    for name, (kind, shape) in sorted(layout.items(), key=lambda it: -types[it[1][0]].itemsize):
        offsets[name], end = end, end + math.prod(shape) * types[kind].itemsize
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offsets[name], end]}
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    path = directory / WEIGHTS_FILE
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for name, tensor in tensors:
                if name not in offsets:
                    raise ValueError(f"stream: {name} is not in the layout, or came before")
                kind, shape = layout[name]
                if tensor.dtype != types[kind] or tuple(tensor.shape) != shape:
                    raise ValueError(
                        f"stream: {name} must be {types[kind]} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
                    )
                file.seek(8 + len(head) + offsets.pop(name))
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        if offsets:
            raise ValueError(f"stream: {', '.join(offsets)} did not come")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def opened(path: Path, framework: str, error: Callable[[str], Exception] = WeightsError) -> Iterator[Any]:
    """Open a safetensors file, tensors left on disk until they are asked for.

    Args:
        path: the file.
        framework: "numpy" or "pt".
        error: makes the exception from its sentence.

    Raises:
        WeightsError: `path` is not a complete safetensors file, or the system cannot map it; or what `error` makes.
    """
    try:
        if not path.is_file() and path.exists():
            raise error(f"{path}: cannot be read (it is no regular file)")
        with path.open("rb") as file:
            head = file.read(8)
            length = int.from_bytes(head, "little")
            if MAX_HEADER_BYTES < length <= path.stat().st_size:
                raise error(
                    f"{path}: expected a header of at most {MAX_HEADER_BYTES:,} bytes, got one of {length:,}: far more "
                    "tensors than a model has, or names far longer"
                )
            header = file.read(length) if length <= MAX_HEADER_BYTES else b""
        handle = safe_open(path, framework)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror or cause})") from None
    except (RuntimeError, MemoryError) as cause:  # PyTorch's and the library's own, of a mapping that is refused
        raise error(
            f"{path}: expected a file that the system can map, got {path.stat().st_size:,} bytes ({cause}); a file "
            "larger than memory and swap together, or than `ulimit -v` allows, has to be split into shards"
        ) from None
    except SafetensorError as cause:
        kind = _pickle(head)
        if kind is not None:
            raise error(
                f"{path}: expected safetensors, got {kind}; pickles are not read since they can run code: convert it "
                "to safetensors first"
            ) from None
        raise error(
            f"{path}: expected a whole safetensors file, got one that is foreign or cut short ({shown_name(cause)})"
        ) from None
    with handle as tensors:
        parsed_json(header, f"{path}: header", error)  # where a name comes twice, the library takes the last one
        yield tensors


def _pickle(head: bytes) -> str | None:
    """Say what kind of pickle a file is by its first 8 bytes; None for none."""
    if head.startswith(b"PK\x03\x04"):
        return "a zip archive as torch.save writes them"
    # The length that a safetensors file starts with may begin with the same two bytes, but it ends in zeros.
    is_pickle = head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5") and any(head[2:])
    return "a pickle" if is_pickle else None
