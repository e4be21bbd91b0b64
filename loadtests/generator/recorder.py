"""Counts, in one process, what locust's event stream reports of the requests of one load."""

import time
from typing import Any

from loadtests.evidence import CONNECTION, NO_ANSWER, SERVER_STAGES, UNSENT
from loadtests.generator.load import Load
from loadtests.generator.sender import Outcome
from loadtests.generator.tally import SAMPLE_BYTES, SAMPLES, Sample, Tally

LOST_LIMIT = 200  # requests in a row without a reply, after which the server is taken for gone


class Recorder:
    """A listener of `events.request`; counts what was due, or in a closed loop answered, in the measured time.

    What a closed loop sent and got no answer to counts when that is known, which is after the measured time where that
    is shorter than the time limit of an answer: the user was lost to the load, and nothing else tells why.
    """

    def __init__(self, load: Load, start_s: float) -> None:
        self.tallies = [Tally(backend, rows) for backend, rows in load.kinds]
        self.fault: str | None = None
        self.longer_s = 0.0  # than the load's own seconds
        self._by_due = load.loop == "open"
        self._start_s = start_s + load.warm_up_s
        self._seconds = load.seconds
        self._sample_every = 1
        self._sample_bytes = 0
        self._lost = 0

    def __call__(self, context: dict[str, Any], **_: object) -> None:
        """Count one request."""
        kind, payload, outcome = context["kind"], context["payload"], context["outcome"]
        tally, code = self.tallies[kind], outcome.code
        if tally.first_ms is None and code is None:
            tally.first_ms = outcome.latency_ms
        if code in (CONNECTION, NO_ANSWER):
            self._lost += 1
            if self._lost >= LOST_LIMIT and self.fault is None:
                self.fault = f"{self._lost} requests in a row got no reply ({code})"
        else:
            self._lost = 0
        moment_s = outcome.due_s if self._by_due else time.perf_counter()
        if moment_s < self._start_s or (moment_s >= self.end_s and (self._by_due or code != NO_ANSWER)):
            return
        tally.sent += 1
        if self._by_due:
            tally.lates_ms.append(outcome.late_ms)
        if code is not None:
            tally.errors[code] += 1
            tally.bad_reply = tally.bad_reply or outcome.fault
            if outcome.head:
                tally.refusals_ms.append(outcome.latency_ms)
            return
        tally.latencies_ms.append(outcome.latency_ms)
        tally.moments_s.append(outcome.due_s - self._start_s)
        tally.batch_rows[outcome.batch_rows] += 1
        for stage in range(len(SERVER_STAGES)):
            tally.stages_ms[stage] += outcome.stages_ms[stage]
        self._keep(tally, payload, outcome)

    @property
    def end_s(self) -> float:
        """The end of the measured time, by `perf_counter`."""
        return self._start_s + self._seconds + self.longer_s

    @property
    def has_counted(self) -> bool:
        """Whether a request was counted."""
        return any(tally.sent for tally in self.tallies)

    def unsent(self, kind: int, due_s: float) -> None:
        """Count a request that was not sent: too many are unanswered, or the time was up when its turn came."""
        if self._start_s <= due_s < self.end_s:
            self.tallies[kind].errors[UNSENT] += 1
            self.tallies[kind].lates_ms.append((time.perf_counter() - due_s) * 1e3)

    def lost(self, kind: int, due_s: float) -> None:
        """Count a request that was sent, but whose reply is no longer waited for."""
        if self._start_s <= due_s < self.end_s:
            self.tallies[kind].sent += 1
            self.tallies[kind].errors[NO_ANSWER] += 1

    def _keep(self, tally: Tally, payload: int, outcome: Outcome) -> None:
        """Keep the first reply and then fewer and fewer, so that all of the load is sampled within a bound on bytes."""
        if tally.answered % self._sample_every or self._sample_bytes > SAMPLE_BYTES:
            return
        tally.samples.append(Sample(tally.backend, tally.rows, payload, outcome.head, outcome.body))
        self._sample_bytes += len(outcome.body)
        if sum(len(each.samples) for each in self.tallies) > SAMPLES:
            for each in self.tallies:
                each.samples = each.samples[::2]
            self._sample_every *= 2
            self._sample_bytes = sum(len(sample.body) for each in self.tallies for sample in each.samples)
