from dataclasses import replace

import pytest

from loadtests.generator.tally import Tally
from loadtests.measuring.generator_watch import ELSEWHERE, busy_warning, fault_of, likely_cause
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
    cause = likely_cause([run], None, None, 0, 2)
    assert (cause is not None) is is_told
    assert cause is None or f"no more than {cpu:.0%} of a core" in cause


@pytest.mark.parametrize(
    ("server_cpus", "url", "remote", "other_cpu", "cores", "advice"),
    [
        (None, None, 0, 0.1, 2, f"give it cores of its own (--server-cpus), or {ELSEWHERE}"),
        (None, None, 0, None, 2, f"give it cores of its own (--server-cpus), or {ELSEWHERE}"),
        (frozenset({0}), None, 0, 0.1, 2, f"give the load more cores or fewer --processes, or {ELSEWHERE}"),
        (None, None, 0, 0.1, 1, f"the server shares its only core; {ELSEWHERE}"),
        (None, "http://127.0.0.1:8000", 0, 0.1, 2, f"cores; start one of several --threads with fewer, or {ELSEWHERE}"),
        (None, "http://127.0.0.1:8000", 0, None, 2, f"start a server of several --threads with fewer, or {ELSEWHERE}"),
        (None, "http://127.0.0.1:8000", 2, None, 2, "or make the load with more workers on other hosts"),
        (None, None, 0, 1.4, 2, f"70% of its 2 cores were used by neither server nor generator; {ELSEWHERE}"),
    ],
    ids=["all cores", "not watched", "cores of its own", "one core", "url", "url, not watched", "workers", "busy"],
)
def test_the_advice_looks_at_what_was_given_and_at_who_used_the_host(
    server_cpus: frozenset[int] | None,
    url: str | None,
    remote: int,
    other_cpu: float | None,
    cores: int,
    advice: str,
) -> None:
    run = replace(
        made_evidence.compared().runs[0], generator_cpu=0.1, late_p99_ms=20.0, invalid="late", other_cpu=other_cpu
    )
    cause = str(likely_cause([run], server_cpus, url, remote, cores)).replace("measure when it is quiet, or ", "")
    assert cause.endswith(advice)
    assert ("(--server-cpus)" in cause) is ("(--server-cpus)" in advice)


def test_what_used_a_host_is_not_guessed_where_the_server_was_not_told_from_others() -> None:
    run = replace(made_evidence.compared().runs[0], generator_cpu=0.1, late_p99_ms=20.0, invalid="late", other_cpu=None)
    cause = str(likely_cause([run], None, "http://127.0.0.1:8000", 0, 2))
    assert (
        "the server or other programs probably share its cores, and only with --server-pid is it known which" in cause
    )
    assert "measure when this host is quiet" in cause


def test_a_busy_host_is_told_before_it_is_loaded() -> None:
    assert busy_warning(0.1, 2) is None
    assert busy_warning(1.4, 2) == (
        "this host is busy: other processes use 140% of 200%; expect runs that do not count"
    )
