"""Swaps the blocks of a model for fused ones, in place, and back."""

import inspect
from collections.abc import Iterable, Iterator
from functools import cache, wraps
from typing import Any, cast

from torch import nn

from models.errors import first_line
from models.fusion import fused_block
from models.fusion.eligibility import REPLACED, unfit_reason
from models.fusion.fused_block import Fused, Fusion
from models.fusion.patterns import Pattern
from models.fusion.probe import mismatch
from models.fusion.recognition import OF_PYTORCH, candidates
from models.fusion.report import FuseReport, LeftAlone, Swapped


def fuse(module: nn.Module) -> FuseReport:
    """Swap every feed-forward block in `module`, itself included, for a fused one that shares its weights.

    On a CPU the activation, the gate and BERT's residual become oneDNN post-ops, on packed copies of the matrices; on a
    GPU they are Triton kernels on the weights themselves. Copies follow the weights: one that was changed in place, by
    ``load_state_dict`` for example, is packed again at the next call. (PyTorch does not count in-place changes made
    through ``.data`` or NumPy, or to a model that was made under ``inference_mode``: on a CPU those take effect only
    after `unfuse` and another `fuse`.)

    Results are those of the block's own forward, rounded less often. Where the fused form cannot do this (training
    mode, autocast, a gradient that is asked for, the transforms of ``torch.func``, forward-mode differentiation,
    tracing by ``torch.jit`` or ``torch.fx``, a hook on an inner layer, one for all modules included, or a forward of
    its own, a call with fewer or more arguments than the forward has parameters), the block's own forward runs, with
    one warning a block.
    ``torch.compile`` takes fused blocks as one operator each; where it traces a block of which one of these is so, it
    takes the block's own forward, and no warning is given; so does ``torch.export`` of every block.
    ``torch.jit.script`` takes no fused block. A copy or a pickle of a fused model is one that is not fused.

    Args:
        module: on a CPU or a CUDA device, in float32, bfloat16 or float16, in ``eval()`` mode.

    Returns:
        The blocks that were swapped, and those that look like one and were left alone, each with the reason.

    Raises:
        TypeError: `module` is no ``torch.nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"fuse: expected a torch.nn.Module, got {type(module).__name__}")
    swapped: list[Swapped] = []
    left_alone: list[LeftAlone] = []
    inside: list[str] = []
    unknown: list[tuple[str, nn.Module]] = []
    for name, block, pattern in candidates(module):
        if any(name.startswith(it) for it in inside):
            continue
        if pattern is None and not isinstance(block, Fused):
            unknown.append((name, block))
            continue
        inside.append(f"{name}." if name else "")
        found = "it is fused already" if pattern is None or isinstance(block, Fused) else _fused(block, pattern)
        kind = type(block).__name__
        if isinstance(found, str):
            left_alone.append(LeftAlone(name, kind, found))
        else:
            kind = found.original.__name__
            activation = None if found.pattern.act is None else found.activation
            swapped.append(Swapped(name, kind, activation, found.implementation, found.copied_bytes))
    known = {id(it) for name in inside for it in module.get_submodule(name.rstrip(".")).parameters()}
    return FuseReport(tuple(swapped), (*left_alone, *_of_unknown_form(unknown, known, bool(inside))))


def unfuse(module: nn.Module) -> tuple[str, ...]:
    """Give every fused block in `module` its own class back, and drop the copies of its weights.

    Returns:
        The names of the blocks; none where nothing was fused.
    """
    names = []
    for name, block in module.named_modules():
        if isinstance(block, Fused):
            fused = cast("nn.Module", block)
            fused.__class__ = block._fusion.original  # first: another thread may call its forward at any moment
            del fused.__dict__["_fusion"]
            names.append(name)
    return tuple(names)


def _of_unknown_form(blocks: Iterable[tuple[str, nn.Module]], known: set[int], has_found: bool) -> Iterator[LeftAlone]:
    """Say of blocks that only look like one why they are left alone; what only holds others that are listed is none.

    Args:
        blocks: outer ones first.
        known: ids of the parameters of blocks whose form is known.
        has_found: whether there are any of those.
    """
    seen = set(known)
    for name, block in blocks:
        weights = {id(it) for it in block.parameters() if it.ndim > 1} - seen
        if weights and (name or not has_found):
            seen |= weights
            children = ", ".join(it for it, _ in block.named_children()) or "none"
            reason = f"its form is unknown: no known one has the children it has, {children}"
            if isinstance(block, OF_PYTORCH):
                reason = "its feed-forward block is no module of its own, but a part of the layer's forward"
            yield LeftAlone(name, type(block).__name__, reason)


def _fused(block: nn.Module, pattern: Pattern) -> Fusion | str:
    """Fuse one block; return why not where it cannot be."""
    if any(it.training for it in block.modules()):
        return "it is in training mode: call eval() first"
    if "forward" in block.__dict__:
        return f"its {REPLACED}"
    reason = unfit_reason(block, pattern)
    if reason is not None:
        return reason
    parameters = list(inspect.signature(type(block).forward).parameters)[1:]
    expected = 2 if pattern.role == "output" else 1
    if len(parameters) != expected:
        return f"its forward takes {', '.join(parameters)}: expected {expected} of them"
    try:
        fusion = Fusion(block, pattern, parameters)
    except Exception as error:
        return f"its weights cannot be laid out for the kernels: {first_line(error)}"
    reason = mismatch(block, fusion)
    if reason is not None:
        return reason
    block.__dict__["_fusion"] = fusion  # before the class and its forward, which another thread may call at once
    try:
        original = type(block)
        block.__class__ = _fused_class(cast("Any", original))
    except TypeError as error:
        del block.__dict__["_fusion"]
        return f"its class cannot be swapped ({error})"
    fused_block.blocks[fusion.key] = cast("Fused", block)
    return fusion


@cache
def _fused_class(original: type[nn.Module]) -> type[nn.Module]:
    @wraps(original.forward)
    def forward(self: Fused, *args: Any, **kwargs: Any) -> Any:  # what a forward takes is read by torch.fx and others
        return Fused.forward(self, *args, **kwargs)

    attributes = {"__module__": original.__module__, "forward": forward}
    return type(f"Fused{original.__name__}", (Fused, original), attributes)
