import pytest

from kernels.aot.cases import MATRIX_KERNELS, cases
from kernels.tiles import Tile
from tests.kernels.aot.made_case import matrix_case


@pytest.mark.parametrize(
    ("arch", "dtype", "block_m", "expected"),
    [
        ("sm_80", "bf16", 64, "HMMA"),
        ("sm_90", "fp16", 64, "HGMMA"),
        ("sm_90", "fp16", 32, "HMMA"),
        ("sm_100", "bf16", 128, "UTCHMMA"),
        ("sm_100", "bf16", 16, "HMMA"),
        ("sm_90", "fp32", 64, None),
        ("gfx942", "fp32", 16, "v_mfma"),
        ("gfx942", "bf16", 64, "v_mfma"),
    ],
)
def test_each_chip_is_asked_for_its_own_matrix_instruction(
    arch: str, dtype: str, block_m: int, expected: str | None
) -> None:
    assert matrix_case(arch, dtype, Tile(block_m, 64, 64, 4, 3)).matrix_instruction == expected


def test_elementwise_kernels_are_asked_for_no_matrix_instruction() -> None:
    kernels = {case.kernel for case in cases(["sm_90"]) if case.matrix_instruction is not None}
    assert kernels == MATRIX_KERNELS


def test_cases_are_named_apart() -> None:
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="arch must be one of sm_80, sm_90, sm_100, gfx942, got 'sm_70'"):
        cases(["sm_70"])
