import pytest

from service.admission import SHORT_WAIT_NS, Admission
from service.errors import OverloadedError


def let_in(admission: Admission, rows: int, in_flight: int = 0) -> int:
    """Admit requests of so many rows until one is refused; return what is in flight then."""
    try:
        while True:
            admission.admit(rows, in_flight)
            in_flight += min(rows, admission.counted_rows)
    except OverloadedError:
        return in_flight


def test_what_is_in_flight_never_exceeds_the_bound() -> None:
    admission = Admission(10)
    assert (let_in(admission, 3), let_in(admission, 1, 9), let_in(admission, 10)) == (9, 10, 10)
    with pytest.raises(OverloadedError, match="the queue is full: 9 rows in flight of at most 10; try again later"):
        admission.admit(2, 9)


def test_a_request_counts_as_no_more_than_it_may() -> None:
    admission = Admission(10, counted_rows=4)
    assert (let_in(admission, 100), let_in(admission, 3)) == (8, 9)


@pytest.mark.parametrize(
    ("rows", "compute_ns", "bound"),
    [(1, SHORT_WAIT_NS // 10, 10), (100, SHORT_WAIT_NS, 100), (100, 4 * SHORT_WAIT_NS, 25), (1, 1, 200), (1, 0, 200)],
)
def test_the_bound_is_what_is_soon_computed_between_the_least_and_the_most(
    rows: int, compute_ns: int, bound: int
) -> None:
    admission = Admission(10, 200)
    assert let_in(admission, 1) == 200  # nothing is known yet
    admission.learn(rows, compute_ns)
    assert let_in(admission, 1) == bound


def test_workers_compute_beside_each_other() -> None:
    admission = Admission(10, 200, workers=1.5)
    admission.learn(100, SHORT_WAIT_NS)
    assert let_in(admission, 1) == 150


def test_the_bound_follows_the_speed_within_some_results_and_one_that_is_slow_changes_little() -> None:
    admission = Admission(10, 1000)
    admission.learn(100, SHORT_WAIT_NS)
    admission.learn(50, SHORT_WAIT_NS)
    assert 85 < let_in(admission, 1) < 100
    for _ in range(40):
        admission.learn(50, SHORT_WAIT_NS)
    assert let_in(admission, 1) in (49, 50)


def test_a_bound_that_is_set_holds_whatever_the_speed() -> None:
    admission = Admission(10)
    for compute_ns in (1, SHORT_WAIT_NS):
        admission.learn(1, compute_ns)
        assert let_in(admission, 1) == 10


def test_a_queue_is_filling_beyond_half_its_bound() -> None:
    admission = Admission(10)
    assert [admission.is_filling(rows) for rows in (5, 6)] == [False, True]
