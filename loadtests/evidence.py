"""The evidence of a comparison under load: one JSON document, written by `compare` and read by the report.

A document holds what was measured: the runs, and the knees that the search found between them. Sentences and plots are
derived from it, so that they can be derived again.
"""

import contextlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from loadtests.errors import UNREADABLE, LoadTestError
from loadtests.output import OutputError

VERSION = 1
DOCUMENT = "compare.json"  # what its file is called
FORM = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)  # of every part of a document that is read
EXPECTED = "{}: expected a document of `python -m loadtests compare`"
Digits = Annotated[str, Field(pattern="^[0-9]{1,15}$")]
Count = Annotated[int, Field(ge=0, le=10**12)]
Whole = Annotated[int, Field(ge=1, le=10**12)]
Amount = Annotated[float, Field(ge=0, le=1e12)]
Signed = Annotated[float, Field(ge=-1e12, le=1e12)]
Positive = Annotated[float, Field(gt=0, le=1e12)]
CONNECTION = "connection"  # the code of a request whose connection was refused, or ended before the whole reply
NO_ANSWER = "no_answer"  # the code of a request that got no whole reply within the time limit
BAD_REPLY = "bad_reply"  # the code of a reply that is not what was asked for
UNSENT = "unsent"  # the code of what was due in an open loop and could not be sent
UNSOLICITED = "unsolicited"  # the code of a connection on which bytes came that no request had asked for
OWN_CODES = frozenset({CONNECTION, NO_ANSWER, BAD_REPLY, UNSENT, UNSOLICITED})  # which no server may use


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds from the intended start of a request to its whole reply; of the requests answered with 200."""

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    mean: Amount
    p50: Amount
    p90: Amount
    p99: Amount
    p999: Amount
    max: Amount


@dataclass(frozen=True, slots=True)
class Stages:
    """Mean milliseconds of a request answered with 200, by where it spent them; they sum to the mean latency.

    All but `wire` come from the server's headers: `x-queue-us` (waiting for its turn), `x-batch-us` (being assembled
    with others), `x-compute-us`, and `x-encode-us` (reading the body and writing the reply). `wire` is the rest: the
    network, the server's HTTP parser, and in an open loop how late the generator was.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    queue: Amount
    batch: Amount
    compute: Amount
    encode: Amount
    wire: Signed


STAGES = tuple(each.name for each in fields(Stages))
SERVER_STAGES = STAGES[:-1]  # those that the server tells


@dataclass(frozen=True, slots=True)
class Run:
    """One backend under one load in one round.

    These codes of `errors` are the generator's own: `connection` (refused, or ended before the reply), `no_answer` (no
    reply in time), `bad_reply` (not an HTTP reply that gives its length, or a 200 that is not what was asked for),
    `unsent` (due in an open loop while the maximum was unanswered), `unsolicited` (connections on which bytes came that
    no request had asked for, the warm-up included; each is closed, and its next request takes another). The last two
    are not part of `sent`. An error that is not in the server's form is named by its status, such as `http_502`.
    """

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    backend: str
    round: Count
    loop: Literal["closed", "open"]
    users: Whole | None  # of a closed loop
    rate_per_s: Positive | None  # offered by an open loop
    seconds: Positive  # measured, the warm-up left out
    sent: Count
    answered: Count  # with 200
    errors: dict[str, Count]  # by code, as the server names it, or one of `OWN_CODES`
    checked: Count  # replies compared with the expected rows
    wrong: Count  # of those
    answered_in_time: Count  # with 200 within the objective
    latency_ms: Latency | None  # None: nothing was answered
    histogram: list[tuple[Positive, Count]]  # upper bound in milliseconds, requests; log-spaced
    stages_ms: Stages | None
    batch_rows: dict[Digits, Count]  # rows computed at once, and the requests that were
    first_ms: Amount | None  # the first request of the warm-up
    server_cpu: Amount | None  # cores in use, by all of the server's processes; None: it runs elsewhere
    server_gpu: Amount | None  # share of the time in use; None: there is none, or it cannot be read
    generator_cpu: Amount  # share of one core in use by the busiest generator process
    late_p99_ms: Amount | None  # how long after its intended start a request left, or was given up; of an open loop
    invalid: str | None  # why the run says nothing about the server; None: it does
    is_search: bool = False  # it tried a rate in the search for a knee
    other_cpu: Amount | None = None  # cores in use by neither server nor generator; None: the server is not watched

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

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    backend: str
    rate_per_s: Positive | None
    above_per_s: Positive | None
    rounds_per_s: list[Positive]  # each round's own bound, for the spread
    note: str | None  # why there is no figure: of the round that has the lower bound, unless it names another
    at_least_per_s: Positive | None = None  # held in most rounds, where the search ended before it had a figure


@dataclass(slots=True)
class Evidence:
    """The whole of a comparison."""

    __pydantic_config__: ClassVar[ConfigDict] = FORM

    conditions: dict[str, Any]  # hardware, versions, commit, as conditions.py has them
    model: str
    backends: dict[str, str]  # name to implementation, in the order they were compared
    rows: Whole  # in each request
    wire: str  # json | binary
    objective_ms: Positive
    seed: int
    command: list[str]
    started: str  # ISO 8601, UTC
    runs: list[Run] = field(default_factory=list)
    knees: list[Knee] = field(default_factory=list)
    ended_early: str | None = None  # why what was asked for is not all there
    version: int = VERSION

    def write(self, path: Path) -> None:
        """Write the document, whole or not at all.

        Raises:
            OutputError: it cannot be written.
        """
        write(path, asdict(self))


def write(path: Path, document: dict[str, Any]) -> None:
    """Write a document as JSON, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(json.dumps(document, indent=1) + "\n")
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise OutputError(f"{path}: expected a file that can be written: {error.strerror}") from error


class EvidenceError(LoadTestError):
    """A file that is not such a document."""


def read(path: Path) -> Evidence:
    """Read a document.

    Raises:
        EvidenceError: the file does not exist, is not JSON, or has another version or form.
    """
    try:
        if path.exists() and not path.is_file():
            raise EvidenceError(f"{EXPECTED.format(path)}, got something else than a file")
        text = path.read_text()
        version = json.loads(text)["version"]
        if version != VERSION:
            raise EvidenceError(f"{path}: expected version {VERSION}, got {str(version)[:80]}; measure anew")
        evidence = _ADAPTER.validate_json(text)
    except FileNotFoundError as error:
        raise EvidenceError(f"{path}: no such file") from error
    except KeyError as error:
        raise EvidenceError(f"{EXPECTED.format(path)}, got one without the field {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EvidenceError(f"{EXPECTED.format(path)}, got in the field {where}: {first['msg']}") from error
    except (OSError, *UNREADABLE) as error:
        raise EvidenceError(f"{EXPECTED.format(path)}, got {error}") from error
    told = {run.backend for run in evidence.runs} | {knee.backend for knee in evidence.knees}
    unnamed = sorted(told - evidence.backends.keys())
    if unnamed or not evidence.backends:
        raise EvidenceError(f"{path}: expected runs of the backends {list(evidence.backends)}, got one of {unnamed}")
    return evidence


_ADAPTER = TypeAdapter(Evidence)
