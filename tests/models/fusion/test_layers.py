"""The kernels of each device take weights as they are stored where they can."""

import pytest

from models import fuse
from tests.models.fusion import made_blocks
from tests.models.fusion.made_blocks import made


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
def test_triton_copies_only_what_is_stored_the_other_way_round(triton: None) -> None:
    for name, expected in (("LlamaMLP", 0), ("Phi3MLP", 0), ("GPT2MLP", 4 * 2 * made_blocks.DIM * made_blocks.HIDDEN)):
        report = fuse(made(name))
        assert [it.implementation for it in report.swapped] == ["triton"]
        assert report.copied_bytes == expected
