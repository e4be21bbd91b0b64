"""The linear layers of a block with what is fused into them: one class for each kind of device."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from kernels import onednn
from kernels.onednn import PackedLinear
from models.config import Activation
from models.fusion.linear import Pair


class Layers(ABC):
    """The linear layers of a block, as the kernels of one kind of device run them; rows are (N, in)."""

    implementation: ClassVar[str]
    copied_bytes: int

    @abstractmethod
    def __init__(self, gate: Pair | None, up: Pair | None, down: Pair | None, activation: Activation) -> None: ...

    @staticmethod
    @abstractmethod
    def unavailable_reason(dtype: torch.dtype) -> str | None:
        """Say in one sentence, without a full stop, why this cannot run; None where it can."""

    @abstractmethod
    def hidden(self, x: Tensor) -> Tensor:
        """Compute ``act(gate(x)) * up(x)``, or ``act(up(x))`` without a gate, or nothing where there is no up."""

    @abstractmethod
    def down(self, h: Tensor, residual: Tensor | None) -> Tensor:
        """Compute ``down(h)``, plus the residual where there is one, or nothing where there is no down."""


class OnCPU(Layers):
    """oneDNN post-ops on packed weights.

    Rows are not padded to counts for which oneDNN has compiled code, as a server's are (models/backends/padding.py):
    there is no warm-up here, so the first pass at each of those counts would wait all the same, and each block would
    copy its rows on every pass. Tried on MiniLM, that lost on later passes what it saved on first ones, and more; it
    gained only in blocks so small that a pass of the whole model takes no longer than the compiling. What a first pass
    costs is in docs/results/fuse-minilm.json.
    """

    implementation = "onednn"

    def __init__(self, gate: Pair | None, up: Pair | None, down: Pair | None, activation: Activation) -> None:
        self._gate, self._up, self._down = (None if it is None else PackedLinear(*it) for it in (gate, up, down))
        self._activation = activation
        self.copied_bytes = sum(it.copied_bytes for it in (self._gate, self._up, self._down) if it is not None)

    @staticmethod
    def unavailable_reason(dtype: torch.dtype) -> str | None:
        """See `Layers`."""
        return onednn.unavailable(dtype)

    def hidden(self, x: Tensor) -> Tensor:
        """See `Layers`."""
        if self._up is None:
            return x
        act, gate = self._activation, self._gate
        return self._up(x, act) if gate is None else self._up.mul(x, gate(x, act))

    def down(self, h: Tensor, residual: Tensor | None) -> Tensor:
        """See `Layers`."""
        if self._down is None:
            return h
        return self._down(h) if residual is None else self._down.add(h, residual)


class OnCUDA(Layers):
    """Triton kernels on the weights themselves; only weights stored as (in, out) are copied."""

    implementation = "triton"

    def __init__(self, gate: Pair | None, up: Pair | None, down: Pair | None, activation: Activation) -> None:
        from kernels.gated_linear import gated_linear
        from kernels.linear import linear

        self.copied_bytes = 0
        self._gate, self._up, self._down = (None if it is None else self._readable(it) for it in (gate, up, down))
        self._activation = activation
        self._linear, self._gated_linear = linear, gated_linear

    @staticmethod
    def unavailable_reason(dtype: torch.dtype) -> str | None:  # noqa: ARG004
        """See `Layers`."""
        from torch.utils._triton import has_triton

        return None if has_triton() else "the kernels need Triton, and none is found that works here"

    def _readable(self, pair: Pair) -> Pair:
        weight, bias = pair
        if weight.stride(-1) != 1:
            weight = weight.contiguous()
            self.copied_bytes += weight.nbytes
        return weight, bias

    def hidden(self, x: Tensor) -> Tensor:
        """See `Layers`."""
        if self._up is None:
            return x
        x = x.contiguous()
        if self._gate is None:
            return self._linear(x, *self._up, activation=self._activation)
        (gate, gate_bias), (up, up_bias) = self._gate, self._up
        return self._gated_linear(x, gate, up, gate_bias, up_bias, activation=self._activation)

    def down(self, h: Tensor, residual: Tensor | None) -> Tensor:
        """See `Layers`."""
        if self._down is None:
            return h
        return self._linear(h.contiguous(), *self._down, residual=None if residual is None else residual.contiguous())


LAYERS: dict[str, type[Layers]] = {"cpu": OnCPU, "cuda": OnCUDA}
