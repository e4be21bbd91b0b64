"""One generator process: sends loads, one after another, through locust."""

import gc
import random
import time
from typing import Any

import gevent
from locust.env import Environment

from loadtests.evidence import UNSOLICITED
from loadtests.generator.closed_loop import ClosedLoopUser
from loadtests.generator.load import Load
from loadtests.generator.locust_statistics import refine
from loadtests.generator.open_files import require_open_files
from loadtests.generator.open_loop import send_arrivals
from loadtests.generator.recorder import Recorder
from loadtests.generator.sender import Sender
from loadtests.generator.tally import Tally
from loadtests.generator.target import ANSWER_LIMIT_S, Payload, Target, payloads

FAILED_PAUSE_S = 0.01  # before a user whose request failed sends the next one
WAIT_STEP_S = 0.005
LINGER_S = 0.1  # after the last reply: one more is yet to come where a second one was taken for the next request's
LONGER_S = 0.1  # that a closed loop goes on at a time, until a reply has come

refine()
gevent.config.track_greenlet_tree = False  # where each greenlet was spawned: a tenth of what a request costs


def new_environment(url: str) -> Environment:
    """Return a locust environment with the users of a closed loop, and no runner yet."""
    return Environment(host=url, user_classes=[ClosedLoopUser], stop_timeout=ANSWER_LIMIT_S)


class Driver:
    """Sends the loads that it is given to one server."""

    load: Load
    recorder: Recorder

    def __init__(self, environment: Environment, target: Target) -> None:
        self.is_over = True
        self._environment = environment
        self._sender = Sender(target)
        self._target = target
        self._payloads: list[list[Payload]] = []
        self._asking = 0  # users that wait for a reply
        self._random = random.Random()  # noqa: S311  picks payloads
        environment.driver = self  # type: ignore[attr-defined]

    def drive(self, load: Load) -> list[Tally]:
        """Send this process's part of a load; return the tally of each kind of request.

        Raises:
            LoadTestError: this process cannot make it.
        """
        require_open_files(load.connections)
        self.load = load
        self._payloads = [payloads(self._target, backend, rows) for backend, rows in load.kinds]
        self._random.seed(repr(load.seed))
        start_s = time.perf_counter()
        self.recorder = Recorder(load, start_s)
        self.is_over = False
        events: Any = self._environment.events.request
        events.add_listener(self.recorder)
        gc.freeze()  # what is loaded: looking through it takes as long as many requests
        watch = gevent.spawn(self._watch, start_s)
        try:
            if load.loop == "open":
                send_arrivals(self, start_s)
            elif load.loop == "closed" and load.users:
                self._spawn(load.users)
            watch.join()
            self._await_replies()
        finally:
            self.is_over = True
            watch.kill()
            self._stop()
            events.remove_listener(self.recorder)
            self._sender.close()
        tallies = self.recorder.tallies
        self._tell_unsolicited(tallies[0])
        for tally in tallies:
            tally.generator_cpu = watch.value or 0.0
            tally.measured_s = load.seconds + self.recorder.longer_s
            tally.fault = self.recorder.fault
        return tallies

    def ask(self) -> None:
        """Send one request of the load in progress, for a user."""
        if self.is_over:
            gevent.sleep(FAILED_PAUSE_S)
            return
        kind, payload = self.pick()
        self._asking += 1
        try:
            code = self.send(kind, payload)
        finally:
            self._asking -= 1
        if code is not None:
            gevent.sleep(FAILED_PAUSE_S)

    def pick(self) -> tuple[int, int]:
        """Return the kind and the number of the next request."""
        kind = self._random.randrange(len(self._payloads)) if len(self._payloads) > 1 else 0
        return kind, self._random.randrange(len(self._payloads[kind]))

    def send(self, kind: int, payload: int, due_s: float | None = None) -> str | None:
        """Send one request and tell locust's event stream what came of it; return the code of its error."""
        sent = self._payloads[kind][payload]
        outcome = self._sender.send(sent, due_s)
        self._environment.events.request.fire(  # type: ignore[no-untyped-call]
            request_type="POST",
            name=f"{sent.inference.name} {self.load.label}",
            response_time=outcome.latency_ms,
            response_length=len(outcome.body),
            exception=outcome.code,
            context={"kind": kind, "payload": payload, "outcome": outcome},
        )
        return outcome.code

    def _tell_unsolicited(self, tally: Tally) -> None:
        """Count, in one tally since no request is theirs, the connections on which bytes came unasked."""
        if found := self._sender.unsolicited:
            tally.errors[UNSOLICITED] += len(found)
            tally.unsolicited = found[0]
            self._sender.unsolicited = []

    def _spawn(self, users: int) -> None:
        runner: Any = self._environment.runner
        runner.spawn_users({ClosedLoopUser.__name__: users})

    def _stop(self) -> None:
        runner: Any = self._environment.runner
        if self.load.loop == "closed" and runner.user_count:
            runner.stop_users({ClosedLoopUser.__name__: runner.user_count})

    def _await_replies(self) -> None:
        """Wait for what users are still waiting for, so that what is never answered counts as such."""
        limit_s = time.perf_counter() + ANSWER_LIMIT_S + LONGER_S
        while self._asking and not self.recorder.fault and time.perf_counter() < limit_s:
            gevent.sleep(WAIT_STEP_S)
        gevent.sleep(LINGER_S)

    def _watch(self, start_s: float) -> float:
        """Return the share of a core that this process used in the measured time, and end the load after it.

        A closed loop goes on until at least one reply has come, at most for as long as a reply is waited for: none may
        come in the time that was asked for if this process or the server did not run, or if a reply takes longer.
        """
        load, recorder = self.load, self.recorder
        has_users = load.loop == "closed" and load.users > 0
        gevent.sleep(start_s + load.warm_up_s - time.perf_counter())
        began_s, cpu_s = time.perf_counter(), time.process_time()
        while not recorder.fault:
            if (left_s := recorder.end_s - time.perf_counter()) > 0:
                gevent.sleep(min(left_s, 0.1))
            elif has_users and not recorder.has_counted and recorder.longer_s < ANSWER_LIMIT_S:
                recorder.longer_s += LONGER_S - left_s
            else:
                break
        used = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
        self.is_over = True
        return used
