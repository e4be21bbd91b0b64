"""Finds the feed-forward blocks of a model, and what looks like one."""

import re
from collections.abc import Iterable, Sequence

from torch import nn

from models.fusion.fused_block import Fused
from models.fusion.patterns import PAIR, PATTERNS, Pattern

_LOOKS_LIKE_ONE = re.compile(r"mlp|ffn|feed_?forward|dense_?act|intermediate|moe|experts", re.IGNORECASE)

OF_PYTORCH = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def candidates(module: nn.Module) -> list[tuple[str, nn.Module, Pattern | None]]:
    """List what is or looks like a feed-forward block, outer ones first, with its pattern if it has a known one."""
    found: dict[str, tuple[nn.Module, Pattern | None]] = {}
    for name, block in module.named_modules():
        if name in found:
            continue
        pattern = _matching(block, _sequence(block) if type(block) is nn.Sequential else PATTERNS)
        looks = isinstance(block, OF_PYTORCH) or _LOOKS_LIKE_ONE.search(type(block).__name__)
        if pattern is not None or looks or isinstance(block, Fused):
            found[name] = block, pattern
        pair = {part: _matching(getattr(block, part, None), (it,)) for part, it in PAIR.items()}
        if all(pair.values()):
            for part, pattern in pair.items():
                found[f"{name}.{part}".lstrip(".")] = getattr(block, part), pattern
    return [(name, *it) for name, it in found.items()]


def _sequence(block: nn.Module) -> Sequence[Pattern]:
    """Return the pattern of a linear layer, an activation and a linear layer, with or without dropout, in sequence."""
    children = [(name, it) for name, it in block.named_children() if not isinstance(it, nn.Dropout)]
    if len(children) != 3 or not (isinstance(children[0][1], nn.Linear) and isinstance(children[2][1], nn.Linear)):
        return ()
    return (Pattern("whole", up=children[0][0], act=children[1][0], down=children[2][0]),)


def _matching(block: object, patterns: Iterable[Pattern]) -> Pattern | None:
    return next((it for it in patterns if all(getattr(block, name, None) is not None for name in it.needed)), None)
