"""The report counts what is held twice."""

from torch import nn

from models import fuse
from tests.models.fusion.made_blocks import DIM, HIDDEN, made


def test_copies_are_counted() -> None:
    bytes_of_weights = 4 * 3 * DIM * HIDDEN
    assert fuse(made("LlamaMLP")).copied_bytes == bytes_of_weights
    assert "3.4 MiB of weights are held a second time" in str(fuse(made("LlamaMLP")))


def test_a_model_without_a_known_block_is_told_so() -> None:
    told = "no feed-forward block was recognised; models/fusion/patterns.py has the names that are known"
    assert told in str(fuse(nn.ModuleDict({"down": nn.Linear(DIM, HIDDEN), "up": nn.Linear(HIDDEN, DIM)}).eval()))
    assert told not in str(fuse(made("LlamaMLP")))
