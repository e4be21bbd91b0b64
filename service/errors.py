"""What can go wrong between a request's bytes and its reply, and the one table that gives each error its status.

The tree continues the one of `models.errors`; each stage of a request raises its own errors:

    MLPError
    ├── InputError, UnknownBackendError, BackendUnavailableError     models: the rows and the backend
    ├── OutOfMemoryError                                             models: more rows than fit
    ├── RemoteError                                                  link: any of them, met by a worker
    └── ServiceError
        ├── UnauthorizedError                                        inference: the key
        ├── NotFoundError, MethodNotAllowedError                     http, response, openinference: the route
        ├── UnsupportedMediaTypeError                                schemas, encoding, headers: how the body is packed
        ├── TooLargeError                                            http, headers, encoding, schemas, openinference
        ├── BadRequestError                                          schemas, openinference, encoding, headers: content
        ├── NotReadyError, DrainingError, OverloadedError            dispatch, backends, pool: admission
        ├── DeadlineExceededError, WorkerLostError                   link, worker: the wait
        ├── NonFiniteOutputError                                     schemas: the reply
        └── InternalError                                            anything else: a fault of ours
"""

import re
from typing import ClassVar

from models.errors import BackendUnavailableError, InputError, MLPError, OutOfMemoryError, UnknownBackendError


class ServiceError(MLPError):
    """An error that the service itself raises; `code` is the slug that callers can switch on."""

    code: ClassVar[str]


class BadRequestError(ServiceError):
    """The body, or a value in it, is not what the route takes."""

    code = "bad_request"


class UnauthorizedError(ServiceError):
    """A key is set and the request carries none, or another one."""

    code = "unauthorized"


class NotFoundError(ServiceError):
    """No such route or model."""

    code = "not_found"


class MethodNotAllowedError(ServiceError):
    """The route exists, with other methods."""

    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class UnsupportedMediaTypeError(ServiceError):
    """The body's declared content type or encoding is not one that the route reads."""

    code = "unsupported_media_type"


class TooLargeError(ServiceError):
    """More body bytes, or more rows, than the server takes in one request."""

    code = "too_large"


class NonFiniteOutputError(ServiceError):
    """The result holds NaN or infinity, which JSON cannot carry."""

    code = "non_finite_output"


class OverloadedError(ServiceError):
    """The queue bound is reached."""

    code = "overloaded"


class NotReadyError(ServiceError):
    """No worker is up, or not every one is warm."""

    code = "not_ready"


class WorkerLostError(ServiceError):
    """The worker that held the request ended before it answered."""

    code = "worker_lost"


class DrainingError(ServiceError):
    """The server is stopping and takes no new requests."""

    code = "draining"


class DeadlineExceededError(ServiceError):
    """The request's time was up before its result was there."""

    code = "deadline_exceeded"


class InternalError(ServiceError):
    """A fault of ours; the message says no more than that, the log has the rest."""

    code = "internal"


PATH = re.compile(r"(?<![\w.:/-])/(?:[^\s/'\"(),;:]+/)*([^\s/'\"(),;:]+)/?")
MAX_SENTENCE = 1000  # characters; a caller's own input is never echoed without bound
MAX_SHOWN = 100  # characters of a path

STATUS: dict[str, int] = {
    "bad_request": 400,
    "unauthorized": 401,
    "not_found": 404,
    "method_not_allowed": 405,
    "too_large": 413,
    "unsupported_media_type": 415,
    "non_finite_output": 422,
    "overloaded": 429,
    "internal": 500,
    "not_ready": 503,
    "backend_unavailable": 503,
    "worker_lost": 503,
    "draining": 503,
    "deadline_exceeded": 504,
}

MODEL_CODES: dict[type[MLPError], str] = {
    InputError: "bad_request",
    UnknownBackendError: "bad_request",
    BackendUnavailableError: "backend_unavailable",
    OutOfMemoryError: "backend_unavailable",
}

RETRY_AFTER_S: dict[str, int] = {
    "overloaded": 1,
    "not_ready": 1,
    "worker_lost": 1,
    "draining": 5,
    "backend_unavailable": 30,
}


def code_of(error: BaseException) -> str:
    """Return the slug of any exception; for one that is not of the tree, `internal`."""
    if isinstance(error, RemoteError):
        return error.remote_code
    if isinstance(error, ServiceError):
        return error.code
    for kind, code in MODEL_CODES.items():
        if isinstance(error, kind):
            return code
    return "internal"


def message_of(error: BaseException) -> str:
    """Return what a caller is told; of a fault of the server, no details."""
    if code_of(error) == "internal":
        return "the server failed to answer this request; its log has the reason under this request's x-request-id"
    sentence = str(error)
    return sentence if len(sentence) <= MAX_SENTENCE else f"{sentence[: MAX_SENTENCE - 3]}..."


def clipped(text: str) -> str:
    """Return a caller's own text for a sentence; only its beginning, if it is long."""
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def without_paths(sentence: str) -> str:
    """Shorten each absolute path to its last name, which is all that a caller may know of this host's files."""
    return PATH.sub(r"\1", sentence)


class RemoteError(MLPError):
    """An error that a worker sent over the wire: its slug and its sentence."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.remote_code = code if code in STATUS else "internal"
