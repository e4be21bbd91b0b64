import time

import gevent

from loadtests.generator.timer import Timer


def test_it_wakes_no_earlier_than_asked_and_lets_others_run_meanwhile() -> None:
    ran: list[int] = []
    other = gevent.spawn(ran.append, 1)
    with Timer() as timer:
        moment_s = time.perf_counter() + 0.05
        timer.sleep_until(moment_s)
        assert time.perf_counter() >= moment_s - 1e-4
    assert ran == [1]
    other.join()


def test_a_moment_that_is_past_is_not_waited_for() -> None:
    ran: list[int] = []
    with Timer() as timer:
        other = gevent.spawn(ran.append, 1)
        timer.sleep_until(time.perf_counter() - 1)
    assert ran == []
    other.join()
