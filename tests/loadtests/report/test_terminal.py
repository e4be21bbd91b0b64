"""What `compare` prints: the three sentences, the search of each backend, and the medians of each load."""

import re
from dataclasses import replace

from loadtests.evidence import Knee
from loadtests.report.points import number, p99_ms, points
from loadtests.report.summary import summary
from loadtests.report.terminal import held, lines
from tests.loadtests import made_evidence


def test_the_sentences_come_first_and_each_load_has_its_medians() -> None:
    evidence = made_evidence.compared()
    said = lines(evidence)
    assert said[:3] == list(summary(evidence))
    assert said[said.index("") + 4].split() == ["backend", "load", "requests/s", "p50", "ms", "p99", "ms"]
    point = points(evidence)[0]
    spread = point.spread(p99_ms)
    assert spread is not None
    (row,) = [line for line in said if line.startswith("eager      1 user ")]
    assert row.split()[-1] == number(spread.median)


def test_a_load_of_which_no_round_counts_says_so() -> None:
    assert "no round counts" in lines(made_evidence.invalid())[-1]
    assert lines(made_evidence.empty())[-1] == ""


def test_what_was_not_answered_is_told_beside_the_latency_of_what_was() -> None:
    (row,) = [line for line in lines(made_evidence.compared()) if line.startswith("eager      1200 requests/s")]
    assert re.fullmatch(r".* 6\d\.\d% not answered", row)
    assert "not answered" not in "".join(line for line in lines(made_evidence.compared()) if "1 user" in line)


def test_a_search_tells_what_it_found_or_why_it_ended() -> None:
    found = Knee("fused", 100.0, 104.0, [99.0, 101.0], None)
    evidence = made_evidence.compared()
    assert (
        held(evidence, found, has_figure=True)
        == "fused: p99 within 50 ms up to 100 requests a second (rounds 99.0 to 101)"
    )
    ended = Knee("fused", None, None, [], "it was late", 2113.0)
    told = "fused: holds at least 2113 a second (the search could not go on: it was late)"
    assert held(evidence, ended, has_figure=True) == told
    none = replace(ended, at_least_per_s=None)
    for knee in (none, ended, replace(found, note="it was late")):
        assert held(evidence, knee, has_figure=False) == "fused: no rate was found: it was late"


def test_what_the_search_tried_is_told_from_what_was_measured_at_the_same_rate() -> None:
    evidence = made_evidence.compared({"eager": 450.0, "fused": 950.0}, rounds=1)
    measured = next(run for run in evidence.runs if (run.backend, run.rate_per_s) == ("eager", 100.0))
    evidence.runs += [replace(measured, is_search=True, invalid="late")] * 3
    rows = [line for line in lines(evidence) if line.startswith("eager      100 requests/s")]
    assert ["tried in the search" in row for row in rows] == [False, True]
    assert ["no round counts" in row for row in rows] == [False, True]


def test_the_sentence_and_the_line_of_a_backend_agree_on_whether_there_is_a_figure() -> None:
    evidence = made_evidence.compared({"eager": 450.0, "fused": 950.0})
    evidence.knees = [
        Knee("eager", None, None, [], "it was late", 70.0),
        Knee("fused", None, None, [], "it was later", 90.0),
    ]
    sentence, *_ = told = lines(evidence)
    assert "fused holds at least 90.0 requests a second (the search could not go on: it was later)" in sentence
    assert "and eager at least 70.0 (the search could not go on: it was late)." in sentence
    assert not [line for line in told if "no rate" in line.lower() or "No figure" in line]
    evidence.runs = [replace(run, invalid="late") for run in evidence.runs]
    sentence, *_ = told = lines(evidence)
    assert sentence.startswith("No figure can be given")
    assert "eager: no rate was found: it was late" in told
