from dataclasses import replace

import pytest

from loadtests.generator.tally import Tally
from loadtests.measuring.generator_watch import fault_of, likely_cause
from tests.loadtests import made_evidence


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


@pytest.mark.parametrize(
    ("cpu", "late_ms", "invalid", "is_told"),
    [(0.1, 20.0, "late", True), (0.7, 20.0, "late", False), (0.1, None, "late", False), (0.1, 2.0, None, False)],
)
def test_a_generator_that_was_late_without_using_its_core_has_a_likely_cause(
    cpu: float, late_ms: float | None, invalid: str | None, is_told: bool
) -> None:
    run = replace(made_evidence.compared().runs[0], generator_cpu=cpu, late_p99_ms=late_ms, invalid=invalid)
    cause = likely_cause([run])
    assert (cause is not None) is is_told
    assert cause is None or f"no more than {cpu:.0%} of a core" in cause
