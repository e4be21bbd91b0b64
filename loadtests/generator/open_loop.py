"""Open loop: requests leave when they are due, whatever became of those before them.

Each is a greenlet of its own, and its latency counts from the moment it was due: a server that stalls delays what is
due meanwhile, and the delay is counted, not left out. As many as may be in flight are; what is due beyond them, or had
not left a second after the end, is counted as `unsent`.
"""

import time
from typing import TYPE_CHECKING

import gevent
import gevent.pool

from loadtests.generator.arrivals import arrivals
from loadtests.generator.load_profile import PROFILES
from loadtests.generator.target import ANSWER_LIMIT_S
from loadtests.generator.timer import Timer

LATEST_S = 1.0  # after the end, for what was due before it

if TYPE_CHECKING:
    from loadtests.generator.driver import Driver


def send_arrivals(driver: "Driver", start_s: float) -> None:
    """Send the requests of the driver's load, and wait for all replies."""
    load = driver.load
    seconds = load.warm_up_s + load.seconds
    moments = arrivals(load.rate_per_s, seconds, load.seed, PROFILES[load.profile])
    latest_s = start_s + seconds + LATEST_S
    unanswered = gevent.pool.Group()
    try:
        with Timer() as timer:
            for moment in moments:
                due_s = start_s + float(moment)
                if time.perf_counter() < due_s:
                    timer.sleep_until(due_s)
                else:
                    gevent.sleep(0)  # late: what is in flight gets its turn all the same
                if driver.recorder.fault is not None:
                    break
                kind, payload = driver.pick()
                if len(unanswered) >= load.max_in_flight or time.perf_counter() > latest_s:
                    driver.recorder.unsent(kind, due_s)
                else:
                    unanswered.add(gevent.spawn(send_due, driver, kind, payload, due_s))
        unanswered.join(2 * ANSWER_LIMIT_S)  # one limit to send, one to be answered
    finally:
        unanswered.kill()


def send_due(driver: "Driver", kind: int, payload: int, due_s: float) -> None:
    """Send one request; where its reply takes too long even by parts, count it as lost."""
    try:
        driver.send(kind, payload, due_s)
    except gevent.GreenletExit:
        driver.recorder.lost(kind, due_s)
