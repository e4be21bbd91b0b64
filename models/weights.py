"""Reads, checks and writes model.safetensors; only `load`, `seeded` and `save` need torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from models.config import ModelConfig, nearest
from models.errors import WeightsError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor, device, dtype

WEIGHTS_FILE = "model.safetensors"
FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_PICKLES = {b"PK\x03\x04": "a zip archive as torch.save writes them", b"\x80": "a pickle"}
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl")


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
                raise WeightsError(f"{path}: {name}: the config has no place for this tensor{nearest(name, expected)}")
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
    if config.init is not None:
        return False
    pickles = sorted(p.name for p in directory.glob("*") if p.suffix in _PICKLE_SUFFIXES)
    if pickles:
        raise WeightsError(
            f"{path}: no such file; {pickles[0]} is there, but pickles are not read since they can run code: convert "
            "it to safetensors first"
        )
    raise WeightsError(f'{path}: no such file; add it, or "init": {{"seed": 0}} to the config for random weights')


def load(
    directory: Path,
    config: ModelConfig,
    dtype: dtype,
    device: device | str = "cpu",
    progress: Callable[[int], None] = lambda _: None,
) -> dict[str, Tensor]:
    """Read the weights of `config`, or make them where it has `init` and `directory` has no weights file.

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
    import torch

    check(directory, config)
    if not has_weights(directory, config):
        return {name: tensor.to(device, dtype) for name, tensor in seeded(config, progress).items()}
    path = directory / WEIGHTS_FILE
    tensors: dict[str, Tensor] = {}
    with opened(path, "pt") as file:
        for name in config.shapes():
            stored = file.get_tensor(name)
            tensor = stored.to(device, dtype)
            if not torch.isfinite(tensor).all():
                if not torch.isfinite(stored).all():
                    raise WeightsError(f"{path}: {name}: expected finite numbers, got NaN or infinity")
                largest = stored.abs().max().item()
                raise WeightsError(f"{path}: {name}: its largest magnitude, {largest:g}, does not fit {dtype}")
            tensors[name] = tensor
            progress(len(tensors))
    return tensors


def seeded(config: ModelConfig, progress: Callable[[int], None] = lambda _: None) -> dict[str, Tensor]:
    """Make random weights for `config`, float32, the same ones on every run.

    A matrix is uniform with variance 1 / fan-in, the down matrices with 1 / (2 depth fan-in), so that the residual
    stream keeps its scale at any depth. Biases are uniform within 1 / sqrt(dim). Norms start as the identity.

    Args:
        config: what the weights have to fit.
        progress: told how many tensors are there so far.

    Raises:
        ValueError: the config has no `init`.

    Source: Radford et al. 2019 (GPT-2), section 2.3, for the scale of what is added to the residual stream.
    """
    import torch

    if config.init is None:
        raise ValueError("seeded: expected a config with init, got one without")
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
    """Write `directory`/model.safetensors; a file that was there is replaced only once the new one is whole."""
    from safetensors.torch import save_file

    path = directory / WEIGHTS_FILE
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.touch()
        mode = partial.stat().st_mode  # safetensors makes files that only their owner reads
        save_file({name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}, partial)
        partial.chmod(mode)
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
        WeightsError: what is at `path` is no whole safetensors file; or what `error` makes.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4)
        handle = safe_open(path, framework)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror or cause})") from None
    except SafetensorError as cause:
        # Only now: a safetensors file starts with a length, whose bytes may be those of a pickle.
        for magic, kind in _PICKLES.items():
            if head.startswith(magic):
                raise error(
                    f"{path}: expected safetensors, got {kind}; pickles are not read since they can run code: convert "
                    "it to safetensors first"
                ) from None
        raise error(
            f"{path}: expected a whole safetensors file, got one that is foreign or cut short ({cause})"
        ) from None
    with handle as tensors:
        yield tensors
