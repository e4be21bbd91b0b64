"""Swaps the feed-forward blocks of an existing PyTorch model for fused ones, in place, and back.

A block remains the same object, with its parameters, its children and its names: only its class is replaced by one
whose `forward` is fused. So ``state_dict``, hooks on the block and ``isinstance`` work as before, changes to the
weights take effect, and `unfuse` has nothing to restore but the class.

Blocks are recognised by the names of their children and by what they compute, without importing the libraries they come
from: the activation is identified by its values, and a few rows are run through both the block's own forward and the
fused one.

Where things are: `patterns` has a row for each kind of block, `recognition` finds them in a model, `eligibility` and
`probe` say which of them are left alone and why, `swap` fuses the others and undoes it, and `report` says what was
done. `fused_block` is what a block becomes, on the `layers` of its device; `linear` reads the weights.
"""

from models.fusion.report import FuseReport
from models.fusion.swap import fuse, unfuse

__all__ = ["FuseReport", "fuse", "unfuse"]
