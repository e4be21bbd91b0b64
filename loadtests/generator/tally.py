"""The counts of one kind of request in one run: made in each generator process, added up in the first."""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from loadtests.evidence import SERVER_STAGES, UNSENT

SAMPLES = 24  # replies kept by each process for comparison with the expected rows
SAMPLE_BYTES = 4 << 20  # of all of them


@dataclass(frozen=True, slots=True)
class Sample:
    """A reply that is kept, to be compared once the load is over."""

    backend: str
    rows: int
    payload: int
    head: bytes
    body: bytes


@dataclass(slots=True)
class Tally:
    """Counts of the requests of one backend and one number of rows; times in milliseconds."""

    backend: str
    rows: int
    sent: int = 0
    latencies_ms: "array[float]" = field(default_factory=lambda: array("d"))  # of those answered with 200
    moments_s: "array[float]" = field(default_factory=lambda: array("d"))  # of each: when it was due, from the start
    lates_ms: "array[float]" = field(default_factory=lambda: array("d"))  # of an open loop, the unsent among them
    refusals_ms: "array[float]" = field(default_factory=lambda: array("d"))  # of those answered with another status
    stages_ms: list[float] = field(default_factory=lambda: [0.0] * len(SERVER_STAGES))  # sums
    batch_rows: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    first_ms: float | None = None
    generator_cpu: float = 0.0  # share of a core
    measured_s: float = 0.0
    bad_reply: str | None = None  # what is wrong with the first of them
    unsolicited: str | None = None  # what came unasked on the first connection on which something did
    fault: str | None = None  # why the load ended before its time

    @property
    def answered(self) -> int:
        """Requests answered with 200."""
        return len(self.latencies_ms)

    @property
    def offered(self) -> int:
        """Requests that were due, whether they could be sent or not."""
        return self.sent + self.errors[UNSENT]

    def within(self, limit_ms: float) -> int:
        """Return how many were answered with 200 within a time."""
        return sum(latency <= limit_ms for latency in self.latencies_ms)

    def add(self, other: "Tally") -> None:
        """Add the counts of another process, or of another kind of request in the same run."""
        self.sent += other.sent
        for name in ("latencies_ms", "moments_s", "lates_ms", "refusals_ms"):
            getattr(self, name).extend(getattr(other, name))
        self.stages_ms = [a + b for a, b in zip(self.stages_ms, other.stages_ms, strict=True)]
        self.batch_rows += other.batch_rows
        self.errors += other.errors
        self.samples += other.samples
        self.first_ms = other.first_ms if self.first_ms is None else self.first_ms
        self.generator_cpu = max(self.generator_cpu, other.generator_cpu)
        self.measured_s = max(self.measured_s, other.measured_s)
        self.bad_reply = self.bad_reply or other.bad_reply
        self.unsolicited = self.unsolicited or other.unsolicited
        self.fault = self.fault or other.fault

    def message(self) -> dict[str, Any]:
        """Return it as locust's messages carry it."""
        document: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        for name, value in document.items():
            if isinstance(value, array):
                document[name] = value.tobytes()
        document["samples"] = [[getattr(each, name) for name in Sample.__slots__] for each in self.samples]
        return document

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Self:
        """Return what `message` made."""
        changed: dict[str, Any] = {"samples": [Sample(*each) for each in message["samples"]]}
        for name, value in message.items():
            if isinstance(value, bytes):
                changed[name] = array("d")
                changed[name].frombytes(value)
        changed |= {name: Counter(message[name]) for name in ("batch_rows", "errors")}
        return cls(**message | changed)


def total(tallies: list[Tally]) -> Tally:
    """Return the sum of a run's kinds of requests."""
    backends = sorted({each.backend for each in tallies})
    rows = {each.rows for each in tallies}
    whole = Tally("+".join(backends), rows.pop() if len(rows) == 1 else 0)
    for each in tallies:
        whole.add(each)
    return whole
