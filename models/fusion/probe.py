"""Compares a block's own forward with its fused one: a block with a pattern's names may compute something else."""

import torch
from torch import Tensor, nn

from models.errors import first_line
from models.fusion.fused_block import Fusion
from models.fusion.linear import pair_of

# It tells another formula, not another rounding: the rule of kernels/numerics.py is for the tests.
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-4, torch.float16: 2**-7}


def mismatch(block: nn.Module, fusion: Fusion) -> str | None:
    """Run three rows of three magnitudes through both, and say how they disagree; None where they agree."""
    pattern = fusion.pattern
    layers = [block._modules[it] for it in pattern.linears]
    widths = [pair_of(layers[0])[0].shape[1]]
    weight = pair_of(layers[0])[0]
    if pattern.role == "output":
        widths.append(fusion.features)
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([[0.1], [1.0], [8.0]])
    inputs = [(scales * torch.randn(3, it, generator=generator)).to(weight) for it in widths]
    with torch.no_grad():
        try:
            own = block.forward(*(it.clone() for it in inputs))
        except Exception as error:
            return f"its own forward fails on three rows of noise with {type(error).__name__}"
        try:
            fused = fusion.run(block, inputs[0], inputs[1] if len(inputs) == 2 else None)
        except Exception as error:
            return f"its fused form fails on three rows of noise with {first_line(error)}"
    if not isinstance(own, Tensor) or own.shape != fused.shape or own.dtype != fused.dtype:
        return "its forward returns something else than the block's result"
    apart = (own.float() - fused.float()).abs().amax(-1)
    if not bool((apart <= _TOLERANCES[own.dtype] * own.float().abs().amax(-1)).all()):
        return "its forward computes something else than its children's names and its activation tell"
    return None
