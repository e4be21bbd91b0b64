"""The plan for GPUs: three kernels for a gated pre-norm block, and one CUDA graph of the whole stack per row bucket.

============  =========================================================  =======
block         kernels                                                    eager's
============  =========================================================  =======
gated, pre    norm; gated_linear; linear with residual                   7
gated, pre    rms_gated_linear; linear with residual                     7
classic, pre  norm; linear with activation; linear with residual         5
post          the products; linear with residual; norm                   as pre
both          as pre, the second norm, the residual in the next norm     one more
============  =========================================================  =======

The second row has the RMSNorm folded into the layer after it, where `python -m kernels tune` measured that to be faster
(kernels/tiles). Its weight is multiplied into gate and up when the first such bucket is readied, so those two are held
a second time. The other two ways to compute a hidden layer (see models/backends/paths.py) take one kernel more; a
product with K split takes one more for its sums.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.activation import gated_activation
from kernels.gated_linear import gated_linear
from kernels.linear import linear
from kernels.norm import WIDEST, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.operands import multiprocessor_count
from kernels.rms_gated_linear import fold_norm, rms_gated_linear
from kernels.tiles import arch_of, is_norm_folded
from models.backends.graphs import Bucketed, bucket, captured
from models.backends.paths import HiddenPath, choose
from models.config import ModelConfig
from models.errors import first_line
from models.mlp import MLP, Block, FeedForward


class FusedOnCUDA(Bucketed):
    """Triton kernels, captured. A bucket whose capture fails runs as plain launches, and `note` says so.

    Where Triton interprets, tensors may be on the CPU: that is for checking results, slowly, and captures nothing.
    """

    implementation = "triton"

    def __init__(self, model: MLP, config: ModelConfig) -> None:
        super().__init__(model, config)
        weight = next(model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._stem = model.stem if isinstance(model.stem, nn.Linear) else None
        self._blocks = [_FusedBlock(block) for block in model.blocks if isinstance(block, Block)]
        self._head = model.head if isinstance(model.head, nn.Linear) else None
        self._pool: Any = None
        self._uncaptured: dict[int, str] = {}
        self._note: str | None = None

    @classmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Look for Triton, and for a dtype that its kernels take."""
        from torch.utils._triton import has_triton

        if not has_triton():
            return f"the kernels need Triton, and none is found that works on {device}"
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            return f"the kernels take float32, float16 or bfloat16, not {dtype}"
        return None

    @property
    def note(self) -> str | None:
        """See `Backend`: which buckets run as plain launches, which blocks' norms are not folded, and why."""
        return self._note

    def _plainness(self) -> str | None:
        if not self._uncaptured:
            return None
        sizes = ", ".join(map(str, sorted(self._uncaptured)))
        reason = self._uncaptured[min(self._uncaptured)]
        return f"plain launches in place of a CUDA graph for up to {sizes} rows, whose capture failed with {reason}"

    def _apartness(self) -> str | None:
        reasons = [block.apart for block in self._blocks if block.apart is not None]
        return f"a norm of its own in {len(reasons)} of {len(self._blocks)} blocks: {reasons[0]}" if reasons else None

    def runner(self, size: int) -> Callable[[Tensor], Tensor]:
        """Compile the kernels of a bucket and capture them; plain launches where there is nothing to capture."""
        path, is_folded = self.path(size), self.is_folded(size)
        for block in self._blocks:
            block.prepare(path, is_folded)
        run = self._captured(size, partial(self.forward, path=path, is_folded=is_folded))
        self._note = "; ".join(filter(None, (self._plainness(), self._apartness()))) or None
        return run

    def _captured(self, size: int, run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        if self.device.type != "cuda":
            return run
        held = self.zeros(size)
        run(held)  # what fails here is no matter of capturing
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            return captured(run, held, self._pool)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._uncaptured[size] = first_line(error)
            return run

    def path(self, rows: int) -> HiddenPath:
        """Return how the hidden layers of a gated model are computed for `rows` rows."""
        name = torch.cuda.get_device_properties(self.device).name if self.device.type == "cuda" else "cpu"
        multiprocessors = multiprocessor_count(next(self.model.parameters()))
        return choose(name, self.dtype, self.config.dim, self.config.hidden, bucket(rows), multiprocessors)

    def is_folded(self, rows: int) -> bool:
        """Tell whether norms are folded into the hidden layers of the path "dual" for `rows` rows."""
        return is_norm_folded(arch_of(self.device), self.dtype, bucket(rows), self.config.dim, self.config.hidden)

    def forward(self, x: Tensor, path: HiddenPath, is_folded: bool) -> Tensor:
        """Launch the kernels on (N, width_in), one after another, hidden layers the given way, norms in them or not."""
        if self._stem is not None:
            x = linear(x, self._stem.weight, self._stem.bias)  # (N, D)
        rest: Tensor | None = None
        for block in self._blocks:
            x, rest = block(x, rest, path, is_folded)  # (N, D)
        if rest is not None:
            x = x + rest
        return x if self._head is None else linear(x, self._head.weight, self._head.bias)  # (N, width_out)


class _FusedBlock:
    """A block. Shapes as in models/mlp.py.

    Attributes:
        apart: why the norm could not be folded into the hidden layer although it should have been; None otherwise.
    """

    def __init__(self, block: Block) -> None:
        self.apart: str | None = None
        self._folded: _NormedHidden | None = None
        self.position = block.position
        self.pre_norm = _norm(block.pre_norm)
        self.hidden = _Hidden(block.ffn)
        self.down = block.ffn.down
        self.post_norm = _norm(block.post_norm)

    def __call__(
        self, x: Tensor, rest: Tensor | None, path: HiddenPath, is_folded: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Take the residual stream as x, or as x + rest with the addition left to the next norm; return it likewise."""
        normed = self.prepare(path, is_folded)
        if normed is not None:
            h = normed(x)  # (N, H)
        else:
            y = x
            if self.pre_norm is not None:
                y, x = (self.pre_norm(x), x) if rest is None else self.pre_norm.add(rest, x)  # (N, D)
            h = self.hidden(y, path)  # (N, H)
        if self.position == "both" and self.post_norm is not None:
            return x, self.post_norm(linear(h, self.down.weight, self.down.bias))
        x = linear(h, self.down.weight, self.down.bias, residual=x)  # (N, D)
        return (x if self.post_norm is None else self.post_norm(x)), None

    def prepare(self, path: HiddenPath, is_folded: bool) -> "_NormedHidden | None":
        """Return the hidden layer with the norm in it, made once; None where there is none to be: see `apart`."""
        if path != "dual" or not is_folded:
            return None
        norm, gate = self.pre_norm, self.hidden.gate
        if self._folded is not None or self.apart is not None or norm is None or gate is None:
            return self._folded
        if self.position == "pre" and isinstance(norm.module, nn.RMSNorm):  # with two norms the first one adds as well
            try:
                self._folded = _NormedHidden(self.hidden, gate, norm)
            except ValueError as error:
                self.apart = str(error)
        return self._folded


class _Hidden:
    """``act(x Wg' + bg) * (x Wu' + bu)``, or ``act(x Wu' + bu)`` where there is no gate: (N, D) to (N, H)."""

    def __init__(self, ffn: FeedForward) -> None:
        self.activation = ffn.activation
        self.gate, self.up = ffn.gate, ffn.up
        self._stack: tuple[Tensor, Tensor | None] | None = None

    def __call__(self, x: Tensor, path: HiddenPath) -> Tensor:
        gate, up = self.gate, self.up
        if gate is None:
            return linear(x, up.weight, up.bias, activation=self.activation)
        if path == "dual":
            return gated_linear(x, gate.weight, up.weight, gate.bias, up.bias, activation=self.activation)
        if self._stack is None:  # a second copy of the two, for the paths that ask for it
            bias = None if gate.bias is None else torch.cat((gate.bias, up.bias))
            self._stack = torch.cat((gate.weight, up.weight)), bias
        both = F.linear(x, *self._stack) if path == "library" else linear(x, *self._stack)  # (N, 2H)
        first, second = both.chunk(2, dim=-1)
        return gated_activation(first, second, self.activation)


class _NormedHidden:
    """A gated hidden layer of RMSNorm(x), (N, D) to (N, H); holds gate and up a second time, times the norm's weight.

    Raises:
        ValueError: the dtype cannot hold those products.
    """

    def __init__(self, hidden: _Hidden, gate: nn.Linear, norm: "_Norm") -> None:
        self.activation, self.eps = hidden.activation, norm.eps
        self.biases = gate.bias, hidden.up.bias
        self.weights = fold_norm(gate.weight, norm.module.weight), fold_norm(hidden.up.weight, norm.module.weight)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_gated_linear(x, *self.weights, *self.biases, eps=self.eps, activation=self.activation)


class _Norm:
    """RMSNorm or LayerNorm; the kernel's up to the width it takes, PyTorch's beyond."""

    def __init__(self, module: nn.RMSNorm | nn.LayerNorm) -> None:
        self.module = module
        self.is_wide = module.weight.numel() > WIDEST
        self.eps = float(module.eps or 0.0)

    def __call__(self, x: Tensor) -> Tensor:
        if self.is_wide:
            out: Tensor = self.module(x)
            return out
        if isinstance(self.module, nn.LayerNorm):
            return layer_norm(x, self.module.weight, self.module.bias, eps=self.eps)
        return rms_norm(x, self.module.weight, eps=self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the norm of ``x + residual``, and that sum."""
        if self.is_wide:
            total = residual + x
            return self.module(total), total
        if isinstance(self.module, nn.LayerNorm):
            return add_layer_norm(x, residual, self.module.weight, self.module.bias, eps=self.eps)
        return add_rms_norm(x, residual, self.module.weight, eps=self.eps)


def _norm(module: nn.Module) -> _Norm | None:
    return _Norm(module) if isinstance(module, nn.RMSNorm | nn.LayerNorm) else None
