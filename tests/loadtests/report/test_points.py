"""Runs are put together by backend and load; what does not count is kept apart."""

from dataclasses import replace

import pytest

from loadtests.evidence import Evidence
from loadtests.report.points import (
    OfferedLoad,
    Spread,
    fault,
    held,
    mean_batch_rows,
    number,
    p50_ms,
    p99_ms,
    points,
    repeated,
)
from tests.loadtests import made_evidence


def test_rounds_of_one_load_are_one_point_and_what_does_not_count_stands_apart() -> None:
    evidence = made_evidence.compared()
    evidence.runs[0] = replace(evidence.runs[0], invalid="the generator was late")
    evidence.runs[1] = replace(evidence.runs[1], wrong=2)
    first, second, third, *others = points(evidence)
    assert [(each.backend, str(each.load)) for each in (first, second)] == [("eager", "1 user"), ("compiled", "1 user")]
    assert [len(each.counted) for each in (first, second, third)] == [2, 2, 3]
    assert [fault(run) for run in (*first.rejected, *second.rejected)] == [
        "the generator was late",
        "2 of 8 checked replies were wrong",
    ]
    assert all(len(each.counted) == 3 and not each.rejected for each in others)


def test_a_spread_has_the_median_the_quartiles_and_the_extremes() -> None:
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]) == Spread(median=3.0, q1=2.0, q3=4.0, low=1.0, high=5.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0, 7.0)


def test_a_figure_that_no_run_has_is_none() -> None:
    point = points(made_evidence.compared())[0]
    assert point.spread(lambda run: run.server_gpu) is None
    nothing = replace(point.counted[0], answered=0, latency_ms=None, batch_rows={})
    assert (p50_ms(nothing), p99_ms(nothing), mean_batch_rows(nothing)) == (None, None, None)


def test_the_mean_batch_is_that_of_the_mean_request() -> None:
    run = replace(made_evidence.compared().runs[0], batch_rows={"1": 1, "4": 3})
    assert mean_batch_rows(run) == 13 / 4


def loads(evidence: Evidence) -> dict[str, OfferedLoad]:
    return {name: point.load for name, point in held(evidence).items()}


def test_backends_are_told_apart_at_the_highest_rate_that_all_of_them_hold() -> None:
    evidence = made_evidence.compared()
    assert set(loads(evidence).values()) == {OfferedLoad("open", 400.0)}
    assert set(loads(replace(evidence, objective_ms=15.0)).values()) == {OfferedLoad("open", 100.0)}
    assert set(loads(replace(evidence, objective_ms=1.0)).values()) == {OfferedLoad("closed", 16.0)}
    assert held(made_evidence.invalid()) == {}


def test_a_rate_of_which_one_backend_has_no_run_that_counts_is_not_common() -> None:
    evidence = made_evidence.compared()
    runs = [
        replace(run, invalid="late") if (run.backend, run.rate_per_s) == ("fused", 400.0) else run
        for run in evidence.runs
    ]
    assert set(loads(replace(evidence, runs=runs)).values()) == {OfferedLoad("open", 300.0)}


def test_where_no_rate_is_common_each_backend_is_shown_at_its_own_highest() -> None:
    evidence = made_evidence.searched()
    expected = {knee.backend: pytest.approx(0.9 * (knee.rate_per_s or 0)) for knee in evidence.knees}
    assert {name: load.amount for name, load in loads(evidence).items()} == expected


def test_latencies_are_shown_of_a_rate_that_is_held_and_was_measured_in_most_rounds() -> None:
    evidence = made_evidence.searched()
    bounds = {knee.backend: knee.rate_per_s or 0 for knee in evidence.knees}
    once = [run for run in evidence.runs if run.loop == "open" and run.round == 0]
    for share in (0.95, 1.05):  # answered well, by one round's luck
        evidence.runs += [
            replace(run, rate_per_s=share * bounds[run.backend]) for run in once if run.rate_per_s == once[0].rate_per_s
        ]
    assert {name: point.rounds for name, point in held(evidence).items()} == dict.fromkeys(bounds, 3)
    assert all(load.amount <= bounds[name] for name, load in loads(evidence).items())
    often = replace(evidence, knees=[replace(knee, rate_per_s=0.8 * bounds[knee.backend]) for knee in evidence.knees])
    expected = {name: pytest.approx(0.75 * bound) for name, bound in bounds.items()}
    assert {name: load.amount for name, load in loads(often).items()} == expected


def test_rates_that_the_search_tried_once_are_in_no_line() -> None:
    evidence = made_evidence.searched()
    found = repeated(points(evidence, "open"))
    assert {len(point.runs) for point in found} == {3}
    assert len(found) == 3 * 6
    once = made_evidence.compared(rounds=1)
    assert repeated(points(once)) == points(once)


def test_what_could_not_be_sent_was_due_as_well() -> None:
    evidence = made_evidence.compared(rounds=1)
    run = replace(evidence.runs[0], sent=80, answered=60, errors={"overloaded": 20, "unsent": 20})
    assert run.due == 100
    assert points(replace(evidence, runs=[run]))[0].failed_share == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.01234, "0.0123"), (0.5, "0.500"), (1.234, "1.23"), (9.999, "10.0"), (99.96, "100"), (1234.5, "1234")],
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text
