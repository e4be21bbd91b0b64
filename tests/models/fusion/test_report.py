"""The report counts what is held twice."""

from models import fuse
from tests.models.fusion.made_blocks import DIM, HIDDEN, made


def test_copies_are_counted() -> None:
    bytes_of_weights = 4 * 3 * DIM * HIDDEN
    assert fuse(made("LlamaMLP")).copied_bytes == bytes_of_weights
    assert "3.4 MiB of weights are held a second time" in str(fuse(made("LlamaMLP")))
