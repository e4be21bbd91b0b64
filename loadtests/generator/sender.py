"""Sends requests over a pool of connections, and says what came of each."""

import time
from dataclasses import dataclass

from loadtests.connection import (
    Connection,
    MalformedReplyError,
    UnexpectedReplyError,
    UnsolicitedReplyError,
    headers_of,
    is_last,
    status_of,
)
from loadtests.evidence import BAD_REPLY, CONNECTION, NO_ANSWER
from loadtests.generator.target import Payload, Target
from loadtests.inference import ReplyError, code_of, require_answered, stages_of

IDLE_LIMIT_S = 5.0  # a connection unused for longer is not used again: the server may be closing it


@dataclass(slots=True)
class Outcome:
    """The outcome of one request; the driver puts it into the `context` of locust's event."""

    due_s: float  # perf_counter's; in a closed loop when it was sent
    latency_ms: float
    late_ms: float
    code: str | None  # None: answered with 200, and as it has to be
    head: bytes = b""
    body: bytes = b""
    stages_ms: tuple[float, ...] = ()
    batch_rows: str = ""
    fault: str | None = None  # what is wrong with a reply that is none


class Sender:
    """The connections of one process to one server."""

    def __init__(self, target: Target) -> None:
        self.unsolicited: list[str] = []  # a sentence for each connection with bytes that no request had asked for
        self._target = target
        self._idle: list[tuple[Connection, float]] = []

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            connection, _ = self._idle.pop()
            self._check_quiet(connection)
            connection.close()

    def send(self, payload: Payload, due_s: float | None = None) -> Outcome:
        """Send a request and wait for its reply; the latency counts from when it was due, if that is given."""
        sent_s = time.perf_counter()
        start_s = sent_s if due_s is None else due_s
        late_ms = (sent_s - start_s) * 1e3
        connection = None
        try:
            connection = self._connection(sent_s)
            head, body = connection.exchange(payload.request)
        except TimeoutError:
            return self._failed(connection, start_s, late_ms, NO_ANSWER)
        except MalformedReplyError as error:
            return self._failed(connection, start_s, late_ms, BAD_REPLY, str(error))
        except (OSError, UnexpectedReplyError):
            return self._failed(connection, start_s, late_ms, CONNECTION)
        except BaseException:  # the greenlet is killed: the reply will come and is nobody's
            if connection is not None:
                connection.close()
            raise
        now_s = time.perf_counter()
        outcome = Outcome(start_s, (now_s - start_s) * 1e3, late_ms, None, head, body)
        if is_last(head):
            connection.close()
        else:
            self._idle.append((connection, now_s))
        if status_of(head) != 200:
            outcome.code = code_of(status_of(head), body)
            return outcome
        try:
            headers = headers_of(head)
            require_answered(payload.inference, headers, body)
            outcome.stages_ms, outcome.batch_rows = stages_of(headers)
        except ReplyError as error:
            outcome.code, outcome.fault = BAD_REPLY, str(error)
        return outcome

    def _connection(self, now_s: float) -> Connection:
        while self._idle:
            connection, used_s = self._idle.pop()
            if self._check_quiet(connection) and now_s - used_s < IDLE_LIMIT_S:
                return connection
            connection.close()
        return self._target.connect()

    def _check_quiet(self, connection: Connection) -> bool:
        """Return whether the connection is open; keep what came over it unasked."""
        try:
            return connection.check_quiet()
        except UnsolicitedReplyError as error:
            self.unsolicited.append(str(error))
            return False

    def _failed(
        self, connection: Connection | None, start_s: float, late_ms: float, code: str, fault: str | None = None
    ) -> Outcome:
        if connection is not None:
            connection.close()
        return Outcome(start_s, (time.perf_counter() - start_s) * 1e3, late_ms, code, fault=fault)
