import numpy as np
import pytest

from loadtests.generator.arrivals import arrivals
from loadtests.generator.load_profile import ramp, spike, steady


def test_the_same_seed_gives_the_same_arrivals_and_another_others() -> None:
    first = arrivals(100, 10, (0, 1), steady)
    np.testing.assert_array_equal(first, arrivals(100, 10, (0, 1), steady))
    assert list(first) != list(arrivals(100, 10, (0, 2), steady))


def test_gaps_are_exponential_as_those_of_a_poisson_process_are() -> None:
    moments = arrivals(1000, 100, (0,), steady)
    assert len(moments) == pytest.approx(100_000, rel=0.02)
    gaps = np.diff(moments)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1e-3, rel=0.02)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # of a steady beat it would be 0
    assert (gaps > 3e-3).mean() == pytest.approx(np.exp(-3), rel=0.1)


def test_a_profile_thins_the_peak_s_arrivals() -> None:
    rising = arrivals(1000, 100, (0,), ramp)
    assert len(rising) == pytest.approx(50_000, rel=0.02)
    assert (rising > 50).mean() == pytest.approx(0.75, rel=0.02)
    spiking = arrivals(1000, 100, (0,), spike)
    assert ((spiking > 40) & (spiking < 60)).sum() == pytest.approx(20_000, rel=0.03)
    assert (spiking < 40).sum() == pytest.approx(8_000, rel=0.05)


def test_the_warm_up_has_the_profile_s_first_share_and_the_profile_the_time_after_it() -> None:
    spiking = arrivals(1000, 100, (0,), spike, warm_up_s=10)
    assert (spiking < 10).sum() == pytest.approx(2_000, rel=0.1)
    assert ((spiking > 50) & (spiking < 70)).sum() == pytest.approx(20_000, rel=0.03)
    assert (arrivals(1000, 100, (0,), ramp, warm_up_s=10) < 10).sum() == 0
