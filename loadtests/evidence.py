"""What a comparison under load leaves behind: one JSON document, written by `compare` and read by the report.

A document holds what was measured: the runs, and the knees that the search found between them. Sentences and plots are
derived from it, so that they can be derived again.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from loadtests.errors import LoadTestError

VERSION = 1
DOCUMENT = "compare.json"  # what its file is called
UNSENT = "unsent"  # the code of what was due in an open loop and could not be sent


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from the intended start of a request to its whole reply; of the requests answered with 200."""

    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float


@dataclass(frozen=True, slots=True)
class Stages:
    """Mean milliseconds of a request answered with 200, by where it spent them; they sum to the mean latency.

    All but `wire` are the server's own words, in its headers: `x-queue-us` (waiting for its turn), `x-batch-us` (being
    put together with others), `x-compute-us` and `x-encode-us` (reading the body and writing the reply). `wire` is the
    rest: the network, the server's HTTP parser, and in an open loop how late the generator was.
    """

    queue: float
    batch: float
    compute: float
    encode: float
    wire: float


STAGES = tuple(each.name for each in fields(Stages))
SERVER_STAGES = STAGES[:-1]  # those that the server tells


@dataclass(frozen=True, slots=True)
class Run:
    """One backend under one load in one round.

    Codes of `errors` that are the generator's own: `connection` (refused or ended before the reply), `no_answer` (none
    in time), `bad_reply` (with 200, and not what was asked for), `unsent` (due in an open loop while as many as may be
    were unanswered; the one code that is no part of `sent`).
    """

    backend: str
    round: int
    loop: str  # closed | open
    users: int | None  # of a closed loop
    rate_per_s: float | None  # offered by an open loop
    seconds: float  # measured, the warm-up left out
    sent: int
    answered: int  # with 200
    errors: dict[str, int]  # by code, as the server names it, and `connection`, `no_answer`, `bad_reply`, `unsent`
    checked: int  # replies compared with the expected rows
    wrong: int  # of those
    answered_in_time: int  # with 200 within the objective
    latency_ms: Latency | None  # None: nothing was answered
    histogram: list[tuple[float, int]]  # upper bound in milliseconds, requests; log-spaced
    stages_ms: Stages | None
    batch_rows: dict[str, int]  # rows computed at once, and the requests that were
    first_ms: float | None  # the first request of the warm-up
    server_cpu: float | None  # cores in use, by all of the server's processes; None: it runs elsewhere
    server_gpu: float | None  # share of the time in use; None: there is none, or it cannot be read
    generator_cpu: float  # share of one core in use by the busiest generator process
    late_p99_ms: float | None  # how long after its intended start a request left, or was given up; of an open loop
    invalid: str | None  # why the run says nothing about the server; None: it does

    @property
    def due(self) -> int:
        """Requests that were due, whether the generator could send them or not."""
        return self.sent + self.errors.get(UNSENT, 0)

    @property
    def answered_per_s(self) -> float:
        """Requests answered with 200 a second."""
        return self.answered / self.seconds

    @property
    def goodput_per_s(self) -> float:
        """Requests answered with 200 within the objective a second."""
        return self.answered_in_time / self.seconds


@dataclass(frozen=True, slots=True)
class Knee:
    """The highest Poisson rate at which a backend's p99 stays within the objective, found by bisection.

    `rate_per_s` held in the majority of rounds, `above_per_s` did not; the two are within 5% of each other. None: not
    even the lowest rate held, or the generator ended first.
    """

    backend: str
    rate_per_s: float | None
    above_per_s: float | None
    rounds_per_s: list[float]  # each round's own bound, for the spread
    note: str | None  # why there is no figure
    at_least_per_s: float | None = None  # held in the majority of rounds, where the search ended before it had a figure


@dataclass(slots=True)
class Evidence:
    """The whole of a comparison."""

    conditions: dict[str, Any]  # hardware, versions, commit, as conditions.py has them
    model: str
    backends: dict[str, str]  # name to implementation, in the order they were compared
    rows: int  # in each request
    wire: str  # json | binary
    objective_ms: float
    seed: int
    command: list[str]
    started: str  # ISO 8601, UTC
    runs: list[Run] = field(default_factory=list)
    knees: list[Knee] = field(default_factory=list)
    ended_early: str | None = None  # why what was asked for is not all there
    version: int = VERSION

    def write(self, path: Path) -> None:
        """Write the document, whole or not at all."""
        write(path, asdict(self))


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a document as JSON, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(path)


class EvidenceError(LoadTestError):
    """A file that is no such document."""


def read(path: Path) -> Evidence:
    """Read a document.

    Raises:
        EvidenceError: the file is not there, is no JSON, or is of another version or form.
    """
    try:
        document = json.loads(path.read_text())
        if document["version"] != VERSION:
            raise EvidenceError(f"{path}: expected version {VERSION}, got {document['version']}; measure anew")
        runs = [
            Run(
                **each
                | {
                    "latency_ms": each["latency_ms"] and Latency(**each["latency_ms"]),
                    "stages_ms": each["stages_ms"] and Stages(**each["stages_ms"]),
                    "histogram": [(upper, count) for upper, count in each["histogram"]],
                }
            )
            for each in document["runs"]
        ]
        return Evidence(**document | {"runs": runs, "knees": [Knee(**each) for each in document["knees"]]})
    except FileNotFoundError as error:
        raise EvidenceError(f"{path}: no such file") from error
    except KeyError as error:
        raise EvidenceError(
            f"{path}: expected a document of `python -m loadtests compare`, got one without the field {error}"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise EvidenceError(f"{path}: expected a document of `python -m loadtests compare`, got {error}") from error
