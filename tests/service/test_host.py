from itertools import pairwise

from service.host import FIRST_DELAY_S, LONGEST_DELAY_S, STEADY_S, Backoff, delay_s


def test_the_wait_doubles_to_a_bound_and_stays_there() -> None:
    waits = [delay_s(failures) for failures in range(1, 9)]
    assert waits[0] == FIRST_DELAY_S
    assert all(later == min(2 * earlier, LONGEST_DELAY_S) for earlier, later in pairwise(waits))
    assert waits[-1] == delay_s(10**6) == LONGEST_DELAY_S


def test_the_first_end_of_a_worker_that_was_warm_waits_for_nothing_and_those_that_follow_soon_do() -> None:
    backoff = Backoff()
    assert [backoff.wait_s(0.1) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]
    assert max(backoff.wait_s(0.1) for _ in range(100)) == LONGEST_DELAY_S
    assert [backoff.wait_s(STEADY_S), backoff.wait_s(0.1)] == [0.0, 0.5]


def test_starts_that_come_to_nothing_wait_for_longer_until_one_is_warm() -> None:
    backoff = Backoff()
    assert [backoff.wait_s(served_s) for served_s in (0.1, None, None, 0.1, None)] == [0.0, 0.5, 1.0, 0.5, 0.5]
    assert [backoff.wait_s(served_s) for served_s in (STEADY_S, None, None, STEADY_S)] == [0.0, 0.5, 1.0, 0.0]
