import pytest
import torch

from kernels.operands import takes_tma

WIDE = torch.zeros(9, 64, dtype=torch.float16)


@pytest.mark.parametrize(
    ("operand", "expected"),
    [
        (WIDE, True),
        (WIDE[:, :57], True),  # rows still start 128 bytes apart
        (WIDE[:, 8:], True),
        (WIDE[::2], True),
        (WIDE[:, 1:], False),
        (torch.zeros(9, 57, dtype=torch.float16), False),
        (torch.zeros(9, 57, dtype=torch.float32), False),
        (torch.zeros(9, 60, dtype=torch.float32), True),
        (WIDE[:1].expand(9, 64), False),  # a stride of zero
        (WIDE[:0], False),
    ],
)
def test_the_copy_engine_reads_rows_that_start_on_16_bytes(operand: torch.Tensor, expected: bool) -> None:
    assert takes_tma(operand) is expected
    assert takes_tma(WIDE, operand) is expected
