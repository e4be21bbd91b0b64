"""The whole network, in plain PyTorch: the reference for what every backend computes.

Source: Shazeer 2020, https://arxiv.org/abs/2002.05202 (gated feed-forward networks); Zhang and Sennrich 2019,
https://arxiv.org/abs/1910.07467 (RMSNorm); Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415 (GELU and its
tanh approximation). Shapes are for N rows of width D = dim, with H = hidden.
"""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Activation, ModelConfig, NormConfig

ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """Compute ``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` where there is no gate."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = config.ffn.bias
        self.activation: Activation = config.ffn.activation
        self.gate = nn.Linear(config.dim, config.hidden, bias) if config.ffn.gated else None
        self.up = nn.Linear(config.dim, config.hidden, bias)
        self.down = nn.Linear(config.hidden, config.dim, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (N, D) to (N, D)."""
        act = ACTIVATIONS[self.activation]
        h = act(self.up(x)) if self.gate is None else act(self.gate(x)) * self.up(x)  # (N, H)
        y: Tensor = self.down(h)  # (N, D)
        return y


class Block(nn.Module):
    """Add the feed-forward network to the residual stream, normalised where the config says."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.position = config.norm.position
        self.pre_norm = norm(config.norm, config.dim) if self.position in ("pre", "both") else nn.Identity()
        self.ffn = FeedForward(config)
        self.post_norm = norm(config.norm, config.dim) if self.position in ("post", "both") else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (N, D) to (N, D)."""
        y = self.ffn(self.pre_norm(x))  # (N, D)
        out: Tensor = self.post_norm(x + y) if self.position == "post" else x + self.post_norm(y)  # (N, D)
        return out


class MLP(nn.Module):
    """An optional stem, the blocks, an optional head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.stem = nn.Identity() if config.in_features is None else nn.Linear(config.in_features, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.head = nn.Identity() if config.out_features is None else nn.Linear(config.dim, config.out_features)

    def forward(self, x: Tensor) -> Tensor:
        """Shape: (N, width_in) to (N, width_out)."""
        x = self.stem(x)  # (N, D)
        for block in self.blocks:
            x = block(x)  # (N, D)
        out: Tensor = self.head(x)  # (N, width_out)
        return out


def norm(config: NormConfig, dim: int) -> nn.Module:
    """Make the norm of one place in a block."""
    if config.kind == "rms":
        return nn.RMSNorm(dim, config.eps)
    if config.kind == "layer":
        return nn.LayerNorm(dim, config.eps)
    return nn.Identity()
