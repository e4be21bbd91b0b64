"""Holds one set of weights and runs it with whichever backend the caller names."""

import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from kernels.dtypes import DTYPES
from kernels.flags import MOST_THREADS
from models import weights
from models.backends import NAMES, Backend, devices, find
from models.config import ModelConfig, nearest
from models.directory import resolve
from models.errors import (
    BackendError,
    BackendUnavailableError,
    InputError,
    OutOfMemoryError,
    UnknownBackendError,
    first_line,
)
from models.mlp import MLP

# Up to here one thread computes. A second one takes up to 0.4 off such a product's time while nobody else computes; but
# where another process keeps a core busy, as an HTTP process under load does, each product waits for the slower thread,
# and the server answers about half as many requests a second.
SMALL_FLOPS = 50_000_000
CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # PyTorch has no class of its own for it


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What a backend is and whether it can run.

    Attributes:
        implementation: what runs it ("torch", "inductor", "onednn", "triton"); None where nothing does.
        state: cold: it can run, but is not warmed up; ready: it is warmed up; unavailable: it cannot run.
        reason: why it is unavailable, one sentence without a full stop; None otherwise.
        note: what is worth knowing about how it runs, such as a failed capture; None for nothing.
    """

    implementation: str | None
    state: Literal["cold", "ready", "unavailable"]
    reason: str | None = None
    note: str | None = None


class Engine:
    """One set of weights and several backends that run it; made by `load_engine`.

    Only one thread may use it at a time.
    """

    def __init__(self, config: ModelConfig, model: MLP, ways: Mapping[str, Backend | str], threads: int) -> None:
        parameter = next(model.parameters())
        self.config = config
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype
        self.threads = threads
        self.parameter_count = config.parameter_count
        self._small_rows = SMALL_FLOPS // config.flops_per_row
        self._backends = {name: way for name, way in ways.items() if isinstance(way, Backend)}
        self._statuses = {name: _status(way) for name, way in ways.items()}

    @property
    def backends(self) -> Mapping[str, BackendStatus]:
        """The status of each backend that was asked for, by name; a view that follows changes."""
        return MappingProxyType(self._statuses)

    @torch.inference_mode()
    def run(self, rows: Tensor, backend: str) -> Tensor:
        """Run the model on `rows`.

        Args:
            rows: (..., width_in), any floating dtype, any device, any strides; converted to the engine's.
            backend: a name among `backends`; the call readies a cold one as far as it needs.

        Returns:
            (..., width_out), the engine's dtype and device, with the leading dimensions of `rows`. NaN and infinity
            pass through.

        Raises:
            InputError: the width or the dtype is wrong.
            UnknownBackendError: no backend of that name was loaded.
            BackendUnavailableError: it cannot run here.
            OutOfMemoryError: the device's memory does not hold so many rows.
        """
        runner = self._available(backend)
        if not isinstance(rows, Tensor) or not rows.dtype.is_floating_point:
            got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
            raise InputError(f"rows: expected a tensor of floating-point numbers, got {got}")
        if rows.ndim == 0 or rows.shape[-1] != self.config.width_in:
            raise InputError(f"rows: expected shape (..., {self.config.width_in}), got {tuple(rows.shape)}")
        x = rows.to(self.device, self.dtype)
        if rows.ndim != 2:
            x = x.reshape(-1, self.config.width_in)
        x = x.contiguous()
        if x.shape[0] == 0:
            return torch.empty((*rows.shape[:-1], self.config.width_out), dtype=self.dtype, device=self.device)
        self._set_threads_for(runner, len(x))
        try:
            result = runner(x)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or CPU_OUT_OF_MEMORY in str(error):
                traceback.clear_frames(error.__traceback__)  # whoever tries fewer rows while handling it needs the room
                raise OutOfMemoryError(len(x), str(self.device)) from error
            raise
        if rows.ndim != 2:
            result = result.reshape(*rows.shape[:-1], self.config.width_out)
        if runner.note != self._statuses[backend].note:
            self._statuses[backend] = replace(self._statuses[backend], note=runner.note)
        return result

    @torch.inference_mode()
    def warm_up(self, max_rows: int, progress: Callable[[str, int, int], None] | None = None) -> None:
        """Ready every available backend for every row count from 1 to `max_rows`.

        Afterwards no call compiles anything. A backend whose warm-up fails becomes unavailable and says why in
        `backends`; the others are not affected.

        Args:
            max_rows: the most rows a call will bring.
            progress: told the backend, how many of its steps are done (0 at its start), and how many there are.

        Raises:
            InputError: `max_rows` is not a positive integer.
        """
        if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
            raise InputError(f"max_rows: expected a positive integer, got {max_rows!r}")
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        for name, backend in list(self._backends.items()):

            def report(done: int, total: int, name: str = name) -> None:
                if progress is not None:
                    progress(name, done, total)

            try:
                backend.warm_up(max_rows, report)
            except Exception as error:
                del self._backends[name]
                self._statuses[name] = _status(f"its warm-up failed with {first_line(error)}")
            else:
                self._statuses[name] = BackendStatus(backend.implementation, "ready", note=backend.note)

    def runner(self, name: str) -> Backend:
        """Return what runs the backend `name`, to be called under ``torch.inference_mode`` on rows that fit it.

        Raises:
            UnknownBackendError, BackendUnavailableError: as `run`.
        """
        return self._available(name)

    def static_input(self, backend: str, rows: int) -> Tensor | None:
        """Return (rows, width_in) on the engine's device that `run` reads in place; see `Backend.static_input`.

        Raises:
            UnknownBackendError, BackendUnavailableError: as `run`.
        """
        return self._available(backend).static_input(rows)

    def _available(self, name: str) -> Backend:
        status = self._statuses.get(name)
        if status is None:
            raise UnknownBackendError(name, self._statuses)
        if status.reason is not None:
            raise BackendUnavailableError(name, status.reason, self._backends)
        return self._backends[name]

    def set_threads(self, backend: str, rows: int) -> None:
        """Let the calling thread's operators use as many threads as `run` would for so many rows.

        Raises:
            UnknownBackendError, BackendUnavailableError: as `run`.
        """
        self._set_threads_for(self._available(backend), rows)

    def _set_threads_for(self, runner: Backend, rows: int) -> None:
        # PyTorch's count belongs to the calling thread, and other engines set it too.
        count = 1 if runner.is_thread_count_free and rows <= self._small_rows else self.threads
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)


def load_engine(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    backends: Sequence[str] = ("eager", "fused"),
    threads: int | None = None,
    progress: Callable[[int, int], None] = lambda _, __: None,
) -> Engine:
    """Load a model and make its backends, without compiling any (`Engine.warm_up` does that).

    Args:
        path: a model directory, or the name of a bundled model.
        device: "cpu", or "cuda" with or without an index.
        dtype: "float32", "bfloat16" or "float16", for weights, rows and results.
        backends: which ones to load; one that cannot run here is loaded as unavailable, with the reason.
        threads: for the CPU's operators; None: what PyTorch is set to now. Every run sets it again.
        progress: told how many of how many steps are done: tensors read, backends made.

    Returns:
        The engine, every backend cold or unavailable.

    Raises:
        ConfigError: there is no model at `path`, or a field of its config is wrong.
        WeightsError: its weights are missing, unreadable or do not fit.
        UnknownBackendError: a name in `backends` is none of eager, compiled, fused.
        BackendError: no backend was named, or the device, the dtype or the thread count is not available.
    """
    if not backends or isinstance(backends, str):
        raise BackendError(f"backends: expected at least one of {', '.join(NAMES)} in a list, got {backends!r}")
    for name in backends:
        if name not in NAMES:
            raise UnknownBackendError(name, NAMES, "backends")
    place, kind = _device(device), _dtype(dtype)
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise BackendError(f"threads: expected a positive integer or None, got {threads!r}")
    if threads is not None and threads > MOST_THREADS:
        raise BackendError(f"threads: expected at most {MOST_THREADS:,} or None, got {threads:,}")
    directory = resolve(path)
    config = ModelConfig.load(directory)
    with torch.device("meta"):
        model = MLP(config)
    names = tuple(dict.fromkeys(backends))
    tensors = len(config.shapes())
    steps = tensors + len(names)
    state = weights.load(directory, config, kind, place, lambda done: progress(done, steps))
    model.load_state_dict(state, assign=True)
    model.requires_grad_(False).eval()
    if threads is not None:
        torch.set_num_threads(threads)
    ways: dict[str, Backend | str] = {}
    for done, name in enumerate(names, start=tensors):
        progress(done, steps)
        way = find(name, place)
        if way is None:
            ways[name] = f"there is no {name} backend for {place.type} yet, only for {', '.join(devices(name))}"
        else:
            ways[name] = way.unavailable_reason(place, kind) or way(model, config)
    progress(steps, steps)
    return Engine(config, model, ways, torch.get_num_threads())


def _status(way: Backend | str) -> BackendStatus:
    if isinstance(way, str):
        return BackendStatus(None, "unavailable", way)
    return BackendStatus(way.implementation, "cold")


def _device(device: str | torch.device) -> torch.device:
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise BackendError(f"device: expected cpu or cuda, got {device!r}") from None
    if place.type not in ("cpu", "cuda"):
        raise BackendError(f"device: expected cpu or cuda, got {str(place)!r}")
    if place.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (place.index or 0) >= count:
            raise BackendError(
                f"device: expected cpu or one of the {count} CUDA devices that torch {torch.__version__} sees, got "
                f"{str(place)!r}"
            )
    return place


def _dtype(dtype: str) -> torch.dtype:
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise BackendError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}{nearest(str(dtype), DTYPES)}")
    return DTYPES[dtype]
