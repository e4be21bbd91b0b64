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


def fixed(rows: int, counted_rows: int | None = None) -> Admission:
    return Admission(rows, rows, counted_rows or rows, batch_rows=rows, workers=1)


def moving(workers: float = 1) -> Admission:
    return Admission(10, 200, counted_rows=10, batch_rows=8, workers=workers)


def test_what_is_in_flight_never_exceeds_the_bound() -> None:
    admission = fixed(10)
    assert (let_in(admission, 3), let_in(admission, 1, 9), let_in(admission, 10)) == (9, 10, 10)
    with pytest.raises(OverloadedError, match="the queue is full: it holds 9 of 10 rows; try again later"):
        admission.admit(2, 9)


def test_a_request_counts_as_no_more_than_it_may() -> None:
    admission = fixed(10, counted_rows=4)
    assert (let_in(admission, 100), let_in(admission, 3)) == (8, 9)
    with pytest.raises(OverloadedError, match="it holds 8 of 10 rows, where a request counts as 4 at most; try again"):
        admission.admit(100, 8)


@pytest.mark.parametrize(
    ("rows", "compute_ns", "bound"),
    [(8, SHORT_WAIT_NS, 10), (8, SHORT_WAIT_NS // 5, 40), (4, SHORT_WAIT_NS // 10, 40), (8, 1, 200), (8, 0, 200)],
)
def test_the_bound_is_what_is_soon_computed_between_the_least_and_the_most(
    rows: int, compute_ns: int, bound: int
) -> None:
    admission = moving()
    assert let_in(admission, 1) == 200  # nothing is known yet
    admission.learn(rows, rows, compute_ns)
    assert let_in(admission, 1) == bound


def test_workers_compute_beside_each_other() -> None:
    admission = moving(workers=1.5)
    admission.learn(8, 8, SHORT_WAIT_NS // 5)
    assert let_in(admission, 1) == 60


def test_small_batches_say_nothing_of_a_queue() -> None:
    admission = moving()
    for _ in range(100):
        admission.learn(1, 3, SHORT_WAIT_NS)
    assert let_in(admission, 1) == 200


def test_a_batch_counts_once_however_many_requests_it_is_of() -> None:
    together, apart = moving(), moving()
    for admission in (together, apart):
        admission.learn(8, 8, SHORT_WAIT_NS // 20)
    together.learn(8, 8, SHORT_WAIT_NS // 5)
    for _ in range(8):
        apart.learn(1, 8, SHORT_WAIT_NS // 5)
    assert let_in(together, 1) == pytest.approx(let_in(apart, 1), rel=0.03)
    assert let_in(together, 1) > 100  # one that is slow changes little


def test_a_request_of_several_batches_is_as_many_rows_in_all_of_their_time() -> None:
    admission = moving()
    admission.learn(80, 8, 2 * SHORT_WAIT_NS)
    assert let_in(admission, 1) == 40


def test_the_bound_follows_the_speed() -> None:
    admission = moving()
    admission.learn(8, 8, SHORT_WAIT_NS // 20)
    for _ in range(60):
        admission.learn(8, 8, SHORT_WAIT_NS // 5)
    assert let_in(admission, 1) in (39, 40)


def test_a_bound_that_is_set_holds_whatever_the_speed() -> None:
    admission = fixed(10)
    for compute_ns in (1, SHORT_WAIT_NS):
        admission.learn(10, 10, compute_ns)
        assert let_in(admission, 1) == 10


def test_large_requests_leave_room_for_small_ones() -> None:
    admission = Admission(16, 16, counted_rows=4, batch_rows=8, workers=1, large_share=0.75)
    assert let_in(admission, 100) == 12
    with pytest.raises(OverloadedError, match="it holds 12 of 12 rows, where a request counts as 4 at most"):
        admission.admit(4, 12)
    assert let_in(admission, 3, 12) == 15
    assert let_in(admission, 1, 12) == 16


def test_a_queue_is_filling_beyond_half_its_bound() -> None:
    assert [fixed(10).is_filling(rows) for rows in (5, 6)] == [False, True]
