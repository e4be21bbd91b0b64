"""Swaps the feed-forward blocks of an existing PyTorch model for fused ones, in place, and back.

A block stays the object it is, with its parameters, its children and its names: only its class becomes one whose
`forward` is fused. So ``state_dict``, hooks on the block and ``isinstance`` go on as before, weights that are changed
are seen, and `unfuse` has nothing to restore but the class.

Blocks are recognised by the names of their children and by what they compute, never by importing whose they are: the
activation is told by its values, and a few rows are run through the block's own forward and the fused one.

Where things are: `patterns` has a row for each kind of block, `recognition` finds them in a model, `eligibility` and
`probe` say which of them stay as they are and why, `swap` fuses the others and gives them back, and `report` tells what
came of it. `fused_block` is what a block becomes, on the `layers` of its device; `linear` reads the weights.
"""

from models.fusion.report import FuseReport
from models.fusion.swap import fuse, unfuse

__all__ = ["FuseReport", "fuse", "unfuse"]
