"""Every number in the report's three sentences is one of the document's, and no claim is larger than the spread."""

import re
import statistics
from dataclasses import replace

import pytest

from loadtests.evidence import Knee
from loadtests.report.points import number
from loadtests.report.summary import capacity, standing, summary, worth
from tests.loadtests import made_evidence


def figures(text: str) -> list[float]:
    return [float(each) for each in re.findall(r"\d+(?:\.\d+)?", text)]


def test_the_first_sentence_has_each_knee_with_its_extremes_the_highest_first() -> None:
    evidence = made_evidence.compared()
    expected = [99.0, 100.0, evidence.objective_ms]
    for knee in sorted(evidence.knees, key=lambda knee: -(knee.rate_per_s or 0)):
        rates = (knee.rate_per_s or 0, min(knee.rounds_per_s), max(knee.rounds_per_s))
        expected += [float(number(rate)) for rate in rates]
    assert figures(capacity(evidence)) == expected
    assert re.findall("fused|compiled|eager", capacity(evidence)) == ["fused", "compiled", "eager"]


def test_the_second_sentence_has_the_ratio_of_knees_extreme_by_opposite_extreme() -> None:
    evidence = made_evidence.compared()
    eager, compiled, fused = evidence.knees
    expected = []
    for other in (eager, compiled):
        low = min(fused.rounds_per_s) / max(other.rounds_per_s)
        high = max(fused.rounds_per_s) / min(other.rounds_per_s)
        ratios = (fused.rate_per_s or 0) / (other.rate_per_s or 1), low, high
        expected += [*(float(f"{ratio:.2f}") for ratio in ratios), 3.0]
    assert figures(worth(evidence)) == expected
    assert "Fusing pays against eager, with 2." in worth(evidence)


def knees(fused: list[float], eager: list[float]) -> str:
    evidence = made_evidence.compared({"eager": 450.0, "fused": 950.0})
    found = [
        Knee(name, statistics.median(rates), statistics.median(rates) * 1.04, rates, None)
        for name, rates in (("eager", eager), ("fused", fused))
    ]
    return worth(replace(evidence, knees=found))


def test_it_says_that_fusing_does_not_pay_where_it_does_not() -> None:
    said = knees(fused=[80.0, 81.0, 82.0], eager=[100.0, 101.0, 102.0])
    assert said == "Fusing does not pay against eager, with 0.80 times the rate (0.78 to 0.82 over 3 rounds)."


def test_it_calls_a_tie_what_the_spread_covers() -> None:
    said = knees(fused=[90.0, 120.0, 130.0], eager=[100.0, 100.0, 100.0])
    assert said == "Fused and eager tie within the spread, with 1.20 times the rate (0.90 to 1.30 over 3 rounds)."


def test_it_calls_a_tie_what_the_search_leaves_open() -> None:
    said = knees(fused=[103.0, 104.0, 104.0], eager=[100.0, 100.0, 100.0])
    assert said.startswith("Fused and eager tie within the 5% that the search leaves open, with 1.04 times")


def test_another_number_of_rounds_is_compared_as_well() -> None:
    said = knees(fused=[200.0, 200.0, 220.0, 220.0], eager=[100.0, 110.0, 120.0])
    assert said == "Fusing pays against eager, with 1.91 times the rate (1.67 to 2.20 over 3 rounds)."


def test_too_few_rounds_that_hold_bear_no_verdict_though_enough_were_made() -> None:
    said = knees(fused=[200.0, 220.0], eager=[100.0, 110.0, 120.0])
    assert said == (
        "Whether fusing pays against eager cannot be said from 2 rounds with a figure for both, of 3 that were made, "
        "with 1.91 times the rate; take more --rounds than 3."
    )


@pytest.mark.parametrize(("rounds", "told"), [(1, "1 round"), (2, "2 rounds")])
@pytest.mark.parametrize("has_knees", [True, False], ids=["knee", "closed loop"])
def test_fewer_than_three_rounds_bear_no_verdict(rounds: int, told: str, has_knees: bool) -> None:
    evidence = made_evidence.compared({"eager": 450.0, "fused": 950.0}, rounds=rounds)
    said = worth(evidence if has_knees else replace(evidence, knees=[]))
    assert said.startswith(f"Whether fusing pays against eager cannot be said from {told}, with ")
    assert said.endswith(f"times {'the rate' if has_knees else 'the replies a second to 16 users'}; take --rounds 3.")


def test_a_round_that_held_nothing_is_not_left_out() -> None:
    said = knees(fused=[200.0, 200.0, 200.0], eager=[0.0, 100.0, 100.0])
    assert said == "Fusing pays against eager, with 2.00 times the rate (2.00 to inf over 3 rounds)."


def test_a_backend_without_a_knee_is_told_with_the_reason_and_compared_by_throughput() -> None:
    evidence = made_evidence.compared({"eager": 450.0, "fused": 950.0})
    evidence.knees[0] = Knee("eager", None, None, [], "p99 was 80 ms at 20 requests/s")
    assert "; no such rate was found for eager (p99 was 80 ms at 20 requests/s)." in capacity(evidence)
    rates = {
        name: [run.answered_per_s for run in evidence.runs if (run.backend, run.users) == (name, 16)]
        for name in evidence.backends
    }
    rounds = [fused / eager for fused, eager in zip(rates["fused"], rates["eager"], strict=True)]
    ratio = statistics.median(rates["fused"]) / statistics.median(rates["eager"])
    assert worth(evidence) == (
        "Whether fusing pays against eager is undecided, since no knee was found for eager; of the closed loop only: "
        f"fusing pays against eager, with {ratio:.2f} times the replies a second to 16 users "
        f"({min(*rounds, ratio):.2f} to {max(*rounds, ratio):.2f} over 3 rounds)."
    )


def test_the_third_sentence_counts_runs_and_checked_replies() -> None:
    evidence = made_evidence.compared()
    assert standing(evidence) == (
        f"All {len(evidence.runs)} runs count, and all {sum(run.checked for run in evidence.runs)} checked replies "
        "were right."
    )
    evidence.runs[3] = replace(evidence.runs[3], invalid="the generator was late")
    assert standing(evidence).startswith("107 of 108 runs count; 1 does not: the generator was late, and all ")


def test_reasons_that_differ_in_figures_alone_are_told_once() -> None:
    evidence = made_evidence.compared()
    for place, share in enumerate((83, 91, 85)):
        evidence.runs[place] = replace(evidence.runs[place], invalid=f"the generator used {share}% of a core")
    evidence.runs[9] = replace(evidence.runs[9], invalid="it was late")
    told = standing(evidence)
    assert "; 4 do not: the generator used 83 to 91% of a core (3 of them) and it was late (1 of them), and" in told


def test_a_figure_that_differs_between_runs_is_told_as_its_range() -> None:
    evidence = made_evidence.compared()
    for place, late_ms in enumerate(("20", "1725.9", "14.6")):
        said = f"1% of the requests left more than {late_ms} ms late, and 10 ms is allowed"
        evidence.runs[place] = replace(evidence.runs[place], invalid=said)
    late = "; 3 do not: the load generator itself fell behind by 14.6 to 1725.9 ms, and 10 ms is allowed, and all"
    assert late in standing(evidence)


def test_a_wrong_reply_makes_nothing_to_be_relied_on() -> None:
    evidence = made_evidence.compared()
    evidence.runs[0] = replace(evidence.runs[0], wrong=3)
    assert "; 1 does not: 3 of 8 checked replies were wrong, and" in standing(evidence)
    assert "3 of 864 checked replies were wrong, so that nothing here is to be relied on" in standing(evidence)


def test_without_a_run_that_counts_nothing_is_claimed() -> None:
    for evidence in (made_evidence.empty(), made_evidence.invalid()):
        first, second, _ = summary(evidence)
        assert first == "No figure can be given, since there is no run that counts."
        assert second.startswith("Whether fusing pays against eager and compiled cannot be said")
    assert standing(made_evidence.invalid()).startswith("None of the 108 runs counts: ")
    assert standing(made_evidence.empty()).startswith("No run was made, and no reply was checked; it ended early: ")


def test_a_knee_of_a_backend_without_a_run_that_counts_is_not_told() -> None:
    evidence = made_evidence.compared()
    runs = [replace(run, invalid="late") if run.backend == "fused" else run for run in evidence.runs]
    said = capacity(replace(evidence, runs=runs))
    assert said.endswith("; no such rate was found for fused (no run of it counts).")
    assert "fused holds" not in said


def test_without_any_knee_it_says_whether_one_was_searched() -> None:
    evidence = made_evidence.compared({"eager": 450.0, "fused": 950.0})
    late = [Knee(name, None, None, [], f"{name} was late") for name in evidence.backends]
    assert capacity(replace(evidence, knees=late)) == (
        "No rate with 99 of 100 requests answered within 50 ms was found for eager (eager was late) and fused "
        "(fused was late)."
    )
    late[0] = replace(late[0], at_least_per_s=70.0)
    assert capacity(replace(evidence, knees=late)) == (
        "With 99 of 100 requests answered within 50 ms, eager holds at least 70.0 requests a second (the search could "
        "not go on: eager was late); no such rate was found for fused (fused was late)."
    )
    of_search = replace(evidence.runs[-2], backend="eager", rate_per_s=70.0, is_search=True, invalid="it was late")
    assert "; 70.0 held although the generator was at its limit); no" in capacity(
        replace(evidence, knees=late, runs=[*evidence.runs, of_search])
    )
    assert "although" not in capacity(
        replace(evidence, knees=late, runs=[*evidence.runs, of_search, replace(of_search, invalid=None)])
    )
    assert capacity(replace(evidence, knees=[])) == (
        "No rate with 99 of 100 requests answered within 50 ms was searched for eager and fused."
    )


def test_what_ended_early_is_told() -> None:
    assert standing(made_evidence.ended_early()).endswith(
        "; it ended early: the server at http://127.0.0.1:8000 is gone."
    )


@pytest.mark.parametrize("backends", [{"eager": 450.0, "compiled": 900.0}, {"fused": 950.0}], ids=str)
def test_without_fused_and_another_backend_its_worth_was_not_measured(backends: dict[str, float]) -> None:
    assert worth(made_evidence.compared(backends)).startswith("Whether fusing pays was not measured")
