import pytest

from service.admission import CALM_NS, Admission
from service.errors import OverloadedError


def let_in(admission: Admission, rows: int, in_flight: int, now_ns: int = 0) -> int:
    """Admit requests of so many rows until one is refused; return what is in flight then."""
    try:
        while True:
            admission.admit(rows, in_flight, now_ns)
            in_flight += min(rows, admission.counted_rows)
    except OverloadedError:
        return in_flight


def test_what_is_in_flight_never_exceeds_the_bound() -> None:
    admission = Admission(10, counted_rows=10)
    assert (let_in(admission, 3, 0), let_in(admission, 1, 9), let_in(admission, 10, 0)) == (9, 10, 10)
    with pytest.raises(OverloadedError, match="the queue is full: 9 rows in flight of at most 10; try again later"):
        admission.admit(2, 9, 0)


def test_a_request_counts_as_no_more_than_it_may() -> None:
    admission = Admission(10, counted_rows=4)
    assert (let_in(admission, 100, 0), let_in(admission, 3, 0)) == (8, 9)


def test_a_burst_is_taken_once_and_again_when_the_queue_was_empty() -> None:
    admission = Admission(10, counted_rows=4, burst_rows=6)
    assert let_in(admission, 1, 0) == 16
    assert [let_in(admission, 1, in_flight) for in_flight in (15, 12, 9, 1)] == [15, 12, 10, 10]
    with pytest.raises(OverloadedError, match="10 rows in flight of at most 10 while requests keep coming; try again"):
        admission.admit(1, 10, 0)
    assert let_in(admission, 1, 0, CALM_NS) == 16


def test_a_moment_without_load_brings_no_second_burst_under_overload() -> None:
    admission = Admission(10, counted_rows=4, burst_rows=6)
    assert let_in(admission, 1, 0, 100) == 16
    assert let_in(admission, 1, 0, 99 + CALM_NS) == 10  # refuses again at that time
    assert let_in(admission, 1, 0, 100 + CALM_NS) == 10
    assert let_in(admission, 1, 0, 100 + 2 * CALM_NS) == 16


def test_a_burst_is_of_as_many_rows_as_count_however_it_comes() -> None:
    admission = Admission(10, counted_rows=4, burst_rows=6)
    assert let_in(admission, 3, 0) == 15  # three within the bound, two beyond it
    assert let_in(admission, 3, 10) == 10
    assert let_in(admission, 100, 0, CALM_NS) == 12


def test_a_queue_is_filling_beyond_half_its_bound() -> None:
    admission = Admission(10, counted_rows=10, burst_rows=90)
    assert [admission.is_filling(rows) for rows in (5, 6)] == [False, True]
