import math

import pytest

from loadtests.evidence import Knee
from loadtests.measuring.knee import MOST_TRIES, WITHIN, Search, after, knee


def search_to(truth: float, search: Search) -> Search:
    while not search.is_over:
        search.tell(search.rate_per_s <= truth)
    return search


@pytest.mark.parametrize("truth", [7.3, 95.0, 100.0, 101.0, 5000.0])
def test_the_bracket_holds_the_truth_and_is_narrow(truth: float) -> None:
    found = search_to(truth, Search(100.0))
    assert found.note is None
    assert found.held_per_s is not None
    assert found.above_per_s is not None
    assert found.held_per_s <= truth < found.above_per_s
    assert found.above_per_s <= found.held_per_s * WITHIN * (1 + 1e-6)
    assert found.tries <= MOST_TRIES


def test_the_next_round_confirms_the_last_one_in_two_tries() -> None:
    first = search_to(123.0, Search(100.0))
    assert search_to(first.held_per_s or 0, after(first)).tries == 2


@pytest.mark.parametrize("change", [0.5, 0.9, 1.1, 2.0])
def test_the_next_round_finds_a_bound_that_has_moved(change: float) -> None:
    truth = 100 * change
    found = search_to(truth, after(search_to(100.0, Search(80.0))))
    assert (found.held_per_s or math.inf) <= truth < (found.above_per_s or 0)


def test_a_rate_that_never_holds_ends_the_search_with_a_note() -> None:
    found = search_to(0.0, Search(100.0))
    assert found.held_per_s is None
    assert "not even" in str(found.note)
    assert found.tries < MOST_TRIES


def test_a_rate_that_always_holds_ends_the_search_with_a_note() -> None:
    assert "no bracket" in str(search_to(math.inf, Search(100.0)).note)


def test_the_knee_is_the_median_round_and_of_two_medians_the_lower() -> None:
    rounds = [search_to(truth, Search(100.0)) for truth in (90.0, 130.0, 110.0)]
    found = knee("fused", rounds)
    assert found.rate_per_s == rounds[2].held_per_s
    assert found.above_per_s == rounds[2].above_per_s
    assert found.rounds_per_s == sorted(each.held_per_s or 0 for each in rounds)
    assert knee("fused", rounds[:2]).rate_per_s == rounds[0].held_per_s


def test_there_is_no_knee_where_the_generator_ended_first() -> None:
    search = Search(100.0)
    search.tell(True)
    search.give_up("the generator used 95% of a core")
    found = knee("fused", [search])
    assert (found.rate_per_s, found.above_per_s) == (None, None)
    assert found.note == "at 150 a second the generator used 95% of a core"
    assert found.at_least_per_s == 100


def test_what_held_before_the_search_ended_is_the_median_round_of_which_one_may_have_held_nothing() -> None:
    searches = [Search(100.0), Search(100.0), Search(100.0)]
    for search, held in zip(searches, (True, False, True), strict=True):
        search.tell(held)
        search.give_up("it was late")
    assert knee("fused", searches).at_least_per_s == 100
    assert knee("fused", searches[:2]).at_least_per_s is None


def test_the_note_is_that_of_the_round_whose_rate_is_the_bound() -> None:
    searches = [Search(rate) for rate in (60.0, 100.0, 200.0)]
    for search in searches:
        search.tell(True)
        search.give_up("it was late")
    assert (knee("fused", searches).at_least_per_s, knee("fused", searches).note) == (
        100,
        "at 150 a second it was late",
    )


def test_a_bound_whose_own_round_came_to_its_end_names_the_round_of_the_note_as_another() -> None:
    ended = search_to(110.0, Search(100.0))
    late = [Search(60.0), Search(200.0)]
    for search in late:
        search.tell(True)
        search.give_up("it was late")
    found = knee("fused", [late[0], ended, late[1]])
    assert (found.rate_per_s, found.at_least_per_s) == (None, ended.held_per_s)
    assert found.note == "in another round, at 90 a second it was late"


def test_there_is_no_knee_of_no_round() -> None:
    assert knee("fused", []) == Knee("fused", None, None, [], "no round was measured")
