"""When a free worker gives callers who were just answered the time to join a batch."""

from collections.abc import Callable

import pytest

from service.hold import LEAST_NS, Hold

MS = 1_000_000


def weights_bound(rows: int) -> int:
    """What a batch takes where reading the weights is most of it, in nanoseconds."""
    return 3 * MS + rows * 10_000


def in_proportion(rows: int) -> int:
    return rows * MS


def arrive(hold: Hold, requests: int, now_ns: int) -> None:
    for _ in range(requests):
        hold.note_arrival(now_ns)


def worker(cost: Callable[[int], int], comes_back: bool, share: float = 0.5) -> tuple[Hold, int]:
    """A hold that has seen batches of 1 and of 8 rows again and again, and the time of the last answers."""
    hold, now_ns = Hold(2, share), 0
    for rows in [1, 8] * 20:
        now_ns += cost(rows)
        hold.note_answers(0, rows, rows, cost(rows), now_ns)
        if comes_back:
            arrive(hold, rows, now_ns + 1000)
    now_ns += cost(8)
    hold.note_answers(0, 8, 8, cost(8), now_ns)
    return hold, now_ns


def test_callers_who_come_back_at_once_are_waited_for_where_a_batch_costs_little_more_than_a_row() -> None:
    hold, now_ns = worker(weights_bound, comes_back=True)
    hold.note_arrival(now_ns + 1000)
    until_ns = hold.until_ns(0, rows=1)
    assert now_ns + LEAST_NS < until_ns <= now_ns + weights_bound(1)


def test_a_batch_that_answers_nobody_teaches_its_time_and_lets_nobody_be_expected() -> None:
    hold, now_ns = worker(weights_bound, comes_back=True)
    hold.note_arrival(now_ns + 1000)
    until_ns = hold.until_ns(0, rows=1)
    hold.note_answers(0, 0, 8, weights_bound(8), now_ns + weights_bound(8))
    assert hold.until_ns(0, rows=1) == until_ns
    hold.note_answers(1, 0, 8, 123, now_ns)
    assert hold._batch_times[1]._means == {(8).bit_length(): (8.0, 123.0)}


def test_a_request_that_finds_the_worker_idle_is_held_back_by_nobody() -> None:
    hold, answered_ns = worker(weights_bound, comes_back=True)
    later_ns = answered_ns + weights_bound(8)
    hold.note_arrival(later_ns)
    assert answered_ns < hold.until_ns(0, rows=1) <= later_ns


def test_nobody_is_waited_for_once_all_are_back() -> None:
    hold, now_ns = worker(weights_bound, comes_back=True)
    arrive(hold, 8, now_ns + 1000)
    assert hold.until_ns(0, rows=8) <= now_ns


@pytest.mark.parametrize(
    ("cost", "comes_back", "share", "backend"),
    [
        (in_proportion, True, 0.5, 0),
        (weights_bound, False, 0.5, 0),
        (weights_bound, True, 0.0, 0),
        (weights_bound, True, 0.5, 1),
        (lambda rows: 50_000 + rows * 100, True, 0.5, 0),
    ],
    ids=["nothing is saved", "nobody comes back", "turned off", "another backend", "too little is saved"],
)
def test_nothing_is_held_back_where_it_would_not_pay(
    cost: Callable[[int], int], comes_back: bool, share: float, backend: int
) -> None:
    hold, now_ns = worker(cost, comes_back, share)
    assert hold.until_ns(backend, rows=1) <= now_ns


def test_one_caller_at_a_time_is_never_held_back() -> None:
    hold, now_ns = Hold(1, 0.5), 0
    for rows in [1, 8] * 25:
        now_ns += 3 * MS
        hold.note_answers(0, 1, rows, 3 * MS, now_ns)
        hold.note_arrival(now_ns + 1000)
        assert hold.until_ns(0, rows=1) <= now_ns


def test_what_has_not_been_seen_yet_promises_nothing() -> None:
    hold = Hold(1, 0.5)
    hold.note_answers(0, 8, 8, 3 * MS, 3 * MS)
    assert hold.until_ns(0, rows=1) <= 3 * MS


def test_callers_who_cease_to_come_back_are_soon_not_waited_for() -> None:
    hold, now_ns = worker(weights_bound, comes_back=True)
    held = []
    for _ in range(30):
        now_ns += weights_bound(8)
        hold.note_answers(0, 8, 8, weights_bound(8), now_ns)
        held.append(hold.until_ns(0, rows=1) > now_ns)
    assert held[0]
    assert not held[-1]
