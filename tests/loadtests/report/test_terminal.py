"""What `compare` prints: the three sentences, the search of each backend, and the medians of each load."""

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


def test_a_search_tells_what_it_found_or_why_it_ended() -> None:
    found = Knee("fused", 100.0, 104.0, [99.0, 101.0], None)
    assert held(found, 50.0) == "fused: p99 within 50 ms up to 100 requests a second (rounds 99.0 to 101)"
    ended = Knee("fused", None, None, [], "it was late", 2113.0)
    assert held(ended, 50.0) == "fused: holds at least 2113 a second (the search ended there: it was late)"
    none = replace(ended, at_least_per_s=None)
    assert held(none, 50.0) == "fused: no rate was found: it was late"
