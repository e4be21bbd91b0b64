import pytest

from loadtests.generator.tally import Tally
from loadtests.measuring.generator_watch import fault_of


def tally(cpu: float, lates_ms: list[float]) -> Tally:
    made = Tally("fused", 1, generator_cpu=cpu)
    made.lates_ms.extend(lates_ms)
    return made


def test_a_generator_with_time_to_spare_is_no_fault() -> None:
    assert fault_of(tally(0.79, []), 50) is None
    assert fault_of(tally(0.1, [0.1] * 1000), 50) is None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (tally(0.81, []), "the generator used 81% of a core, more than 80%"),
        (tally(0.1, [0.1] * 95 + [20.0] * 5), "left more than 20.0 ms late, and 10 ms is allowed"),
    ],
    ids=["cpu", "late"],
)
def test_a_generator_at_its_limit_is_a_fault_in_a_sentence(made: Tally, message: str) -> None:
    assert message in str(fault_of(made, 50))


def test_a_millisecond_late_is_allowed_however_tight_the_objective() -> None:
    assert fault_of(tally(0.1, [0.9] * 100), 0.5) is None


@pytest.mark.parametrize(("cpu", "is_told"), [(0.1, True), (0.7, False)])
def test_a_generator_that_was_late_without_using_its_core_has_a_likely_cause(cpu: float, is_told: bool) -> None:
    assert (
        "start the server with fewer threads (`-- --threads 1`)" in str(fault_of(tally(cpu, [20.0]), 50))
    ) is is_told
