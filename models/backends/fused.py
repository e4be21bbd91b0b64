"""Fewer, larger operators: activation, gate and residual are computed while the product's tile is in registers."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.norm_cpu import RMSNormCPU
from kernels.onednn import PackedLinear, plain_rows, unavailable
from models.backends.padding import Padded
from models.config import ModelConfig
from models.mlp import MLP, Block


class FusedOnCPU(Padded):
    """oneDNN post-ops on packed weights, and an RMSNorm of fewer passes than PyTorch's.

    oneDNN's blocked layout needs a copy, so this holds the matrices a second time.

    Tried and left out, with the time relative to this plan's, on two Zen 4 cores at 768x3072, four blocks: gate and up
    stacked as one product with a pass for the gate, 1.02 to 1.04 in float32, 0.91 to 1.1 in bfloat16 on a busy machine;
    128 or 256 rows at a time, 0.98 to 1.13. On Zen 5: activation, gate and residual as separate passes, 1.04 to 1.1.
    The compiler's plan has the same products and post-ops, and from 256 rows on both reach at least 96% of the rate of
    one large product there (docs/results/bench-cpu-bfloat16.json), so neither can gain much on the other.
    """

    implementation = "onednn"

    def __init__(self, model: MLP, config: ModelConfig) -> None:
        super().__init__(model, config)
        self._stem = _packed(model.stem)
        self._blocks = [_FusedBlock(block) for block in model.blocks if isinstance(block, Block)]
        self._head = _packed(model.head)
        self._note = _smallness(model)

    @property
    def note(self) -> str | None:
        """See `Backend`."""
        return self._note

    @classmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        """Ask the kernels, which try each post-op."""
        return unavailable(dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Backend`."""
        rows = x.shape[0]
        padding = self.padded_rows(rows) - rows
        if padding:
            x = F.pad(x, (0, 0, 0, padding))
        if self._stem is not None:
            x = self._stem(x)  # (N, D)
        for block in self._blocks:
            x = block(x)  # (N, D)
        if self._head is not None:
            x = self._head(x)  # (N, width_out)
        return x[:rows] if padding else x


class _FusedBlock:
    """A block in two or three products and its norms. Shapes as in models/mlp.py."""

    def __init__(self, block: Block) -> None:
        self.position = block.position
        self.activation = block.ffn.activation
        self.pre_norm = _norm(block.pre_norm)
        self.gate = _packed(block.ffn.gate)
        self.up = PackedLinear(block.ffn.up.weight, block.ffn.up.bias)
        self.down = PackedLinear(block.ffn.down.weight, block.ffn.down.bias)
        self.post_norm = _norm(block.post_norm)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.pre_norm(x)  # (N, D)
        act, gate = self.activation, self.gate
        h = self.up(y, act) if gate is None else self.up.mul(y, gate(y, act))  # (N, H)
        if self.position == "both":
            return x.add(self.post_norm(self.down(h)))  # (N, D)
        out: Tensor = self.post_norm(self.down.add(h, x))  # (N, D)
        return out


def _packed(module: nn.Module | None) -> PackedLinear | None:
    return PackedLinear(module.weight, module.bias) if isinstance(module, nn.Linear) else None


def _norm(module: nn.Module) -> Callable[[Tensor], Tensor]:
    if isinstance(module, nn.RMSNorm) and module.weight is not None and module.eps is not None:
        return RMSNormCPU(module.weight, module.eps)
    return module  # LayerNorm is one operator in PyTorch already


def _smallness(model: MLP) -> str | None:
    """Say up to how many rows no product is large enough for a post-op; None where every row count has one."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    rows = min(
        plain_rows(layer.weight.dtype, layer.in_features, layer.out_features, has_activation=True)  # its smaller answer
        for layer in layers
    )
    many = f"up to {rows} rows" if rows > 1 else "for one row"
    return f"{many} every product is PyTorch's own, too small to repay oneDNN's call" if rows else None
