"""Open loop: requests leave when they are due, whatever became of those before them.

They are sent by a pool of greenlets (callers.py). The latency of each counts from the moment it was due: a server that
stalls delays what is due meanwhile, and that delay is counted. The number in flight is limited; what is due beyond it,
or had not left a second after the end, is counted as `unsent`.
"""

import time
from typing import TYPE_CHECKING

import gevent

from loadtests.generator.arrivals import arrivals
from loadtests.generator.callers import Callers
from loadtests.generator.load_profile import PROFILES
from loadtests.generator.target import ANSWER_LIMIT_S
from loadtests.generator.timer import Timer

LATEST_S = 1.0  # after the end, for what was due before it

if TYPE_CHECKING:
    from loadtests.generator.driver import Driver


def send_arrivals(driver: "Driver", start_s: float) -> None:
    """Send the requests of the driver's load, and wait for all replies."""
    load = driver.load
    moments = arrivals(load.rate_per_s, load.seconds, load.seed, PROFILES[load.profile], load.warm_up_s)
    latest_s = start_s + load.warm_up_s + load.seconds + LATEST_S
    callers = Callers(driver.send, driver.recorder.lost)
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
                if callers.busy >= load.max_in_flight or time.perf_counter() > latest_s:
                    driver.recorder.unsent(kind, due_s)
                else:
                    callers.send((kind, payload, due_s))
        callers.join(2 * ANSWER_LIMIT_S)  # one limit to send, one to be answered
    finally:
        callers.kill()
