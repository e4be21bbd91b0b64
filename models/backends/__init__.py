"""The contract between the engine and its backends, and the table of the backends there are.

A backend is a class for one kind of device. It is asked whether it can run (`unavailable_reason`), made from the
module that holds the weights, readied (`warm_up`), and called. It never chooses another backend: if it cannot run, it
says so.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import ClassVar

import torch
from torch import Tensor

from models.config import ModelConfig
from models.mlp import MLP

# Where each one's classes live, by device type. A name absent for a device has no plan for it.
_PLANS = {
    "eager": {"cpu": "models.backends.eager:Eager", "cuda": "models.backends.eager:Eager"},
    "compiled": {"cpu": "models.backends.compiled:CompiledOnCPU", "cuda": "models.backends.compiled:CompiledOnCUDA"},
    "fused": {"cpu": "models.backends.fused:FusedOnCPU", "cuda": "models.backends.fused_cuda:FusedOnCUDA"},
}
NAMES = tuple(_PLANS)

# oneDNN compiles code the first time it meets a shape: docs/results/fuse-minilm.json has what that takes. Within both
# bounds that would show in a request; beyond them it drowns in the work.
READY_ROWS = 64
READY_FLOPS = 4 * 10**9


class Backend(ABC):
    """One way to run the model.

    Args:
        model: holds the weights, on the device and in the dtype to run in; shared with the other backends and never
            written to.
        config: what `model` was made from.
    """

    implementation: ClassVar[str]
    """What a reply names as having run."""

    is_thread_count_free: ClassVar[bool] = True
    """Whether a call may have another count of CPU threads than the one before; compiled code is bound to one."""

    def __init__(self, model: MLP, config: ModelConfig) -> None:
        self.model = model
        self.config = config

    @classmethod
    @abstractmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Say in one sentence, without a full stop, why this cannot run there; None where it can."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Run the model on (N, width_in), N > 0, contiguous, to (N, width_out), under ``torch.inference_mode``.

        Dtype and device are the model's. The result is the caller's to keep.
        """

    @property
    def note(self) -> str | None:
        """What is worth knowing about how it runs here, one sentence without a full stop; None for nothing."""
        return None

    def static_input(self, rows: int) -> Tensor | None:  # noqa: ARG002
        """Return (rows, width_in) that a call reads in place, where rows written there before spare it a copy.

        Every other call with so many rows overwrites it. None where there is no such place, or none yet.
        """
        return None

    def warm_up(self, max_rows: int, progress: Callable[[int, int], None]) -> None:
        """Ready every row count from 1 to `max_rows`: afterwards none of them compiles anything.

        Args:
            max_rows: the most rows a call will bring.
            progress: told how many of how many steps are done, 0 at the start.

        Raises:
            Exception: whatever goes wrong; the engine then marks the backend unavailable.
        """
        sizes = self.sizes(max_rows)
        progress(0, len(sizes))
        for done, size in enumerate(sizes, start=1):
            self.ready_for(size)
            progress(done, len(sizes))

    def sizes(self, max_rows: int) -> Sequence[int]:
        """Return the row counts that ready this for calls of up to `max_rows` rows, rising."""
        return row_counts(self.config, max_rows)

    def ready_for(self, size: int) -> None:
        """Ready one of `sizes`, by running it."""
        self(self.zeros(size))

    def zeros(self, rows: int) -> Tensor:
        """Make an input of `rows` rows."""
        weight = next(self.model.parameters())
        return torch.zeros(rows, self.config.width_in, dtype=weight.dtype, device=weight.device)


def find(name: str, device: torch.device) -> type[Backend] | None:
    """Return the class that runs the backend `name` on `device`, None where there is none.

    Raises:
        KeyError: no backend has this name.
    """
    plan = _PLANS[name].get(device.type)
    if plan is None:
        return None
    module, _, attribute = plan.partition(":")
    backend: type[Backend] = getattr(import_module(module), attribute)
    return backend


def devices(name: str) -> Sequence[str]:
    """Return the device types that the backend `name` has a plan for."""
    return tuple(_PLANS[name])


def row_counts(config: ModelConfig, max_rows: int) -> Sequence[int]:
    """Return the row counts worth running before the first request: each small one, and `max_rows`."""
    cheap = max(1, min(READY_ROWS, READY_FLOPS // config.flops_per_row))
    return sorted({*range(1, min(cheap, max_rows) + 1), max_rows})
