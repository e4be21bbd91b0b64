"""The inference operations: what a request's headers and body ask for, and what its reply says.

All of it is plain calls on the event loop. There are two ways in: `service.protocol` takes the usual request, without a
task or a future, and `service.http` takes every other one through ASGI.
"""

import hmac
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from service import openinference, schemas
from service.dispatch import Dispatcher, Ticket
from service.encoding import decoded, require_known
from service.errors import (
    BadRequestError,
    NonFiniteOutputError,
    NotReadyError,
    UnauthorizedError,
    code_of,
)
from service.guard import Guard
from service.headers import Headers
from service.link import Result
from service.logs import is_request_logged, log_request
from service.metrics import Metrics
from service.reply import Content, Reply, binary_content, error_reply, json_content

if TYPE_CHECKING:
    from service.traces import Traces  # which loads OpenTelemetry's SDK

INFER_PATH = re.compile(r"/v2/models/([^/]+)/infer")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InferenceOptions:
    """What the operations need to know of the settings and the model."""

    model: str
    width_in: int
    labels: tuple[str, ...] | None
    max_request_rows: int
    max_body_bytes: int
    api_key: str | None


class Operation(ABC):
    """One way to ask for inference and to be answered; `route` is its path's pattern."""

    route: str

    def __init__(self, options: InferenceOptions) -> None:
        self.options = options

    @abstractmethod
    def check(self, headers: Headers) -> None:
        """Refuse a request by its headers, before its body is read.

        Raises:
            UnsupportedMediaTypeError: the content type, or the encoding, is not one that the route reads.
            BadRequestError: a header of the protocol is malformed.
        """

    @abstractmethod
    def parse(self, headers: Headers, body: bytes | bytearray) -> schemas.InferenceRequest:
        """Read a body.

        Raises:
            BadRequestError: it is not valid for the route.
            TooLargeError: it has too many rows.
        """

    @abstractmethod
    def encode(self, request: schemas.InferenceRequest, result: Result, total_ns: int) -> Content:
        """Write the result, `total_ns` after the request's head was read.

        Raises:
            NonFiniteOutputError: the reply's form cannot hold the result.
        """


class Predict(Operation):
    """`POST /predict` and `POST /predict/{backend}`."""

    def __init__(self, options: InferenceOptions, backend: str | None = None) -> None:
        """`backend` is the one in the path."""
        super().__init__(options)
        self.backend = backend
        self.route = "/predict" if backend is None else "/predict/{backend}"

    def check(self, headers: Headers) -> None:
        """See `Operation`."""
        schemas.require_json(headers.get(b"content-type", b""))
        require_known(headers.get(b"content-encoding", b""))

    def parse(self, headers: Headers, body: bytes | bytearray) -> schemas.InferenceRequest:  # noqa: ARG002
        """See `Operation`."""
        request = schemas.parse_predict(body, self.options.width_in, self.options.max_request_rows)
        if self.backend is not None:
            if request.backend not in (None, self.backend):
                raise BadRequestError(
                    f"backend: the path asks for {schemas.shortened(self.backend)} and the body for "
                    f"{schemas.shortened(request.backend)}"
                )
            request.backend = self.backend
        return request

    def encode(self, request: schemas.InferenceRequest, result: Result, total_ns: int) -> Content:
        """See `Operation`."""
        schemas.require_finite(result.rows)
        reply: dict[str, Any] = {"outputs": result.rows.reshape(*request.shape, result.rows.shape[1])}
        if self.options.labels:
            reply["labels"] = schemas.labels_of(result.rows, self.options.labels, request.shape)
        reply["backend"] = result.backend
        reply["implementation"] = result.implementation
        if request.id is not None:
            reply["id"] = request.id
        reply["timing"] = {
            "queue_ms": result.queue_ns / 1e6,
            "compute_ms": result.compute_ns / 1e6,
            "total_ms": total_ns / 1e6,
            "batch_rows": result.batch_rows,
        }
        return json_content(reply)


class Infer(Operation):
    """`POST /v2/models/{name}/infer`."""

    route = "/v2/models/{name}/infer"

    def check(self, headers: Headers) -> None:
        """See `Operation`."""
        if openinference.LENGTH_HEADER in headers:
            openinference.json_length(headers[openinference.LENGTH_HEADER])
        else:
            schemas.require_json(headers.get(b"content-type", b""))
        require_known(headers.get(b"content-encoding", b""))

    def parse(self, headers: Headers, body: bytes | bytearray) -> openinference.InferRequest:
        """See `Operation`."""
        declared = headers.get(openinference.LENGTH_HEADER)
        json_bytes = None if declared is None else openinference.json_length(declared)
        options = self.options
        return openinference.parse_infer(body, options.width_in, options.max_request_rows, json_bytes, options.model)

    def encode(self, request: schemas.InferenceRequest, result: Result, total_ns: int) -> Content:  # noqa: ARG002
        """See `Operation`."""
        shape = (*request.shape, result.rows.shape[1])
        if isinstance(request, openinference.InferRequest) and request.is_binary_reply:
            head = openinference.binary_head(
                self.options.model, request.id, result.backend, result.implementation, shape, result.rows.nbytes
            )
            return binary_content(head, result.rows.data.cast("B"))
        schemas.require_finite(result.rows)
        reply = openinference.reply_head(self.options.model, request.id, result.backend, result.implementation)
        output = {"name": openinference.OUTPUT, "datatype": "FP32", "shape": shape, "data": result.rows.reshape(-1)}
        return json_content(reply | {"outputs": [output]})


class InferOtherModel(Infer):
    """`POST /v2/models/{name}/infer` for another model: refused, and counted as other requests are."""

    def __init__(self, options: InferenceOptions, name: str) -> None:
        """`name` is the one in the path."""
        super().__init__(options)
        self._name = name

    def check(self, headers: Headers) -> None:  # noqa: ARG002
        """Refuse it.

        Raises:
            NotFoundError: always.
        """
        raise openinference.no_such_model(self._name, self.options.model)


class Inference:
    """Finds the operation that a path names and takes requests through it."""

    def __init__(
        self, dispatcher: Dispatcher, options: InferenceOptions, metrics: Metrics, guard: Guard | None = None
    ) -> None:
        """Make one instance per API process, before the fork; the default `guard` shadows nothing."""
        self.dispatcher = dispatcher
        self._backends = dispatcher.backends
        self._metrics = metrics
        self._guard = guard or Guard(dispatcher, metrics)
        self._is_shadowing = self._guard.is_shadowing
        self.traces: Traces | None = None
        self.options = options
        paths = {f"/predict/{name}": Predict(options, name) for name in dispatcher.backends.names}
        self._operations: dict[str, Operation] = {
            "/predict": Predict(options),
            f"/v2/models/{options.model}/infer": Infer(options),
            **paths,
        }
        self.targets: Mapping[bytes, Operation] = {
            path.encode(): operation for path, operation in self._operations.items() if path.isascii()
        }
        """The operations by request target, in its usual spelling."""

    def operation(self, path: str) -> Operation | None:
        """Return the operation of a decoded path; None where the path is not for inference."""
        if path.startswith("/predict/") and path not in self._operations:
            return Predict(self.options, path.removeprefix("/predict/"))
        operation = self._operations.get(path)
        if operation is None and (other := INFER_PATH.fullmatch(path)):
            return InferOtherModel(self.options, other[1])
        return operation

    def require_key(self, headers: Headers) -> None:
        """Compare the caller's key, where one is set, in constant time.

        Raises:
            UnauthorizedError: the key is missing or wrong.
        """
        key = self.options.api_key
        if key is None:
            return
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        token = headers.get(b"x-api-key", bearer.lstrip(b" ") if scheme.lower() == b"bearer" else b"")
        if not hmac.compare_digest(token, os.fsencode(key)):
            raise UnauthorizedError(
                "expected this server's key in the header X-API-Key, or as Authorization: Bearer <key>, got "
                f"{'another one' if token else 'none'}"
            )

    def start(
        self,
        operation: Operation,
        headers: Headers,
        body: bytes | bytearray,
        request_id: bytes,
        started_ns: int,
        send: Callable[[Reply], None],
    ) -> Ticket | None:
        """Take one request through; `send` is called once, now or later, with the reply or the error's.

        Args:
            operation: what is asked for.
            headers: by lower-case name.
            body: whole, as it came.
            request_id: for the log.
            started_ns: when the request began, on the monotonic clock.
            send: takes the reply.

        Returns:
            What abandons the request; None where it was refused.
        """
        backend: str | None = None
        whole_ns = time.monotonic_ns()
        try:
            encoding = headers.get(b"content-encoding")
            if encoding is not None:
                body = decoded(body, encoding, self.options.max_body_bytes)
            request = operation.parse(headers, body)
            accepted_ns = time.monotonic_ns()
            backend = self._backends.route() if request.backend is None else request.backend
            times_ns = (started_ns, whole_ns, accepted_ns)
            ticket = Ticket(self._metrics)
            deliver = partial(self._finish, operation, headers, request_id, request, times_ns, send, ticket, backend)
            return self.dispatcher.submit(request, backend, accepted_ns, deliver, ticket)
        except Exception as error:
            send(self.refuse(error, operation, headers, request_id, started_ns, backend))
            return None

    def _finish(
        self,
        operation: Operation,
        headers: Headers,
        request_id: bytes,
        request: schemas.InferenceRequest,
        times_ns: tuple[int, int, int],
        send: Callable[[Reply], None],
        ticket: Ticket,
        backend: str | None,
        outcome: Result | Exception,
    ) -> None:
        """Send the reply to a request with this outcome, or have it run on another backend, to which `ticket` moves.

        `times_ns` are when its head was read, its body was complete, and it was accepted, on the monotonic clock.
        """
        started_ns, whole_ns, accepted_ns = times_ns
        try:
            if isinstance(outcome, Exception):
                raise outcome
            self._backends.require_kept(outcome.backend)
            result_ns = time.monotonic_ns()
            lines, body = operation.encode(request, outcome, result_ns - started_ns)
        except Exception as error:
            deliver = partial(self._finish, operation, headers, request_id, request, times_ns, send, ticket)
            try:
                if self._guard.retry(request, backend, outcome, error, accepted_ns, deliver, ticket):
                    return
            except NotReadyError as worse:
                error = worse
            reply = self.refuse(error, operation, headers, request_id, started_ns, backend)
            if isinstance(outcome, Result) and isinstance(error, NonFiniteOutputError):  # it ran: tell on what
                encode_us = (accepted_ns - whole_ns + time.monotonic_ns() - result_ns) // 1000
                reply = reply._replace(head=result_head(reply.head, outcome, encode_us))
            send(reply)
            return
        encoded_ns = time.monotonic_ns()
        total_ns = encoded_ns - started_ns
        encode_us = (accepted_ns - whole_ns + encoded_ns - result_ns) // 1000
        if is_request_logged():
            log_request(
                request_id=request_id.decode("latin-1"),
                status=200,
                backend=outcome.backend,
                rows=len(outcome.rows),
                queue_us=outcome.queue_ns // 1000,
                batch_us=outcome.batch_ns // 1000,
                compute_us=outcome.compute_ns // 1000,
                encode_us=encode_us,
                total_us=total_ns // 1000,
                batch_rows=outcome.batch_rows,
            )
        self._metrics.answered(
            outcome.backend, total_ns / 1e9, outcome.queue_ns / 1e9, outcome.compute_ns / 1e9, outcome.batch_rows
        )
        send(Reply(200, result_head(lines, outcome, encode_us), body))
        if self._is_shadowing:
            self._guard.answered(request, outcome)
        if self.traces is not None:
            self.traces.answered(operation.route, headers, request_id, outcome, (*times_ns, result_ns, encoded_ns))

    def abandon(
        self, ticket: Ticket, operation: Operation, headers: Headers, request_id: bytes, started_ns: int
    ) -> None:
        """Give up a request whose caller has gone; the arguments are those of `start`, which gave the ticket."""
        if not ticket.abandon():
            return
        if is_request_logged():
            total_us = (time.monotonic_ns() - started_ns) // 1000
            log_request(request_id=request_id.decode("latin-1"), status="abandoned", total_us=total_us)
        if self.traces is not None:
            self.traces.abandoned(operation.route, headers, request_id, started_ns)

    def refuse(
        self,
        error: Exception,
        operation: Operation,
        headers: Headers,
        request_id: bytes,
        started_ns: int,
        backend: str | None = None,
    ) -> Reply:
        """Count an inference request that fails, and return the error's reply."""
        code = code_of(error)
        self._metrics.refused(backend, code)
        reply = logged_reply(error, request_id)
        if is_request_logged():
            total_us = (time.monotonic_ns() - started_ns) // 1000
            name = request_id.decode("latin-1")
            log_request(request_id=name, status=reply.status, code=code, backend=backend, total_us=total_us)
        if self.traces is not None:
            self.traces.refused(operation.route, headers, request_id, reply.status, code, backend, started_ns)
        return reply


def logged_reply(error: Exception, request_id: bytes) -> Reply:
    """Return an error's reply; a fault of the server is logged."""
    if code_of(error) == "internal":
        name = request_id.decode("latin-1")
        log.error("request %s failed", name, exc_info=error, extra={"request_id": name})
    return error_reply(error)


def result_head(lines: bytes, result: Result, encode_us: int) -> bytes:
    """Return the header lines of an inference reply: those of its body, then what ran and for how long."""
    return b"%b%bx-queue-us: %d\r\nx-batch-us: %d\r\nx-compute-us: %d\r\nx-encode-us: %d\r\nx-batch-rows: %d\r\n" % (
        lines,
        names_head(result.backend, result.implementation),
        result.queue_ns // 1000,
        result.batch_ns // 1000,
        result.compute_ns // 1000,
        encode_us,
        result.batch_rows,
    )


@lru_cache(maxsize=64)
def names_head(backend: str, implementation: str) -> bytes:
    """Return the header lines that say what ran."""
    return f"x-backend: {backend}\r\nx-implementation: {implementation}\r\n".encode()
