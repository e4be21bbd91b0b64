import pytest
import torch

from kernels.numerics import chain, disagreement


@pytest.fixture
def exact() -> torch.Tensor:
    return torch.randn(64, 33, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def test_rounding_once_to_the_dtype_agrees(exact: torch.Tensor) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert disagreement(exact.to(dtype), exact.to(dtype), exact) is None


def test_one_wrong_element_is_the_largest_error(exact: torch.Tensor) -> None:
    fused = exact.float()
    fused[3, 5] += 1e-5
    assert "largest error" in str(disagreement(fused, exact.float(), exact))


def test_a_small_error_everywhere_is_the_rms_error(exact: torch.Tensor) -> None:
    eager = exact.bfloat16()
    coarse = (exact + 0.75 * (eager.double() - exact).abs().max()).bfloat16()
    assert "rms error" in str(disagreement(coarse, eager, exact))


def test_nan_disagrees(exact: torch.Tensor) -> None:
    fused = exact.float()
    fused[0, 0] = torch.nan
    assert "largest error nan" in str(disagreement(fused, exact.float(), exact))


def test_another_shape_or_dtype_disagrees(exact: torch.Tensor) -> None:
    assert "(32, 33)" in str(disagreement(exact.float()[:32], exact.float(), exact))
    assert "bfloat16" in str(disagreement(exact.bfloat16(), exact.float(), exact))


def test_no_elements_agree() -> None:
    assert disagreement(torch.empty(0, 3), torch.empty(0, 3), torch.empty(0, 3, dtype=torch.float64)) is None


def test_the_reference_must_be_finite_float64_of_one_shape(exact: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"exact must be float64, got torch\.float32"):
        disagreement(exact.float(), exact.float(), exact.float())
    with pytest.raises(ValueError, match=r"exact has shape \(64, 33\), eager \(64, 32\)"):
        disagreement(exact.float(), exact.float()[:, :32], exact)
    with pytest.raises(ValueError, match="must be finite"):
        disagreement(exact.float(), exact.float(), exact / 0)


def test_a_longer_chain_of_sums_is_allowed_more(exact: torch.Tensor) -> None:
    fused = exact.float()
    fused[3, 5] += 2e-6
    assert disagreement(fused, exact.float(), exact) is not None
    assert disagreement(fused, exact.float(), exact, roundings=chain(4)) is not None
    assert disagreement(fused, exact.float(), exact, roundings=chain(4096)) is None
