"""The raw ASGI front: answers the inference routes itself and passes every other one to LitServe's FastAPI app.

It stands outside the app's own middleware, so inference replies meet no gzip and no per-route machinery, and every
error of every route leaves through the same door and in the same form.
"""

import asyncio
import contextlib
import hmac
import logging
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from service import openinference, schemas
from service.dispatch import Dispatcher, Result
from service.errors import (
    BadRequestError,
    MethodNotAllowedError,
    TooLargeError,
    UnauthorizedError,
    UnsupportedMediaTypeError,
    code_of,
)
from service.response import App, Header, Message, Receive, Response, Scope, Send

OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready", "/health"})
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
DISCARD_BYTES = 256 << 20
DISCARD_S = 2.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """What the front needs to know of the settings and the model."""

    model: str
    width_in: int
    labels: tuple[str, ...] | None
    max_request_rows: int
    max_body_bytes: int
    api_key: str | None


class Disconnected(Exception):  # noqa: N818
    """The client went away before it had sent its body; nobody is left to answer."""


class Front:
    """ASGI middleware; one instance per API process, made before the fork and started by the lifespan."""

    def __init__(self, app: App, dispatcher: Dispatcher, options: FrontOptions) -> None:
        """`app` is what answers the other routes."""
        self._app = app
        self._dispatcher = dispatcher
        self._options = options
        self._infer_path = f"/v2/models/{options.model}/infer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_ns = time.monotonic_ns()
        path: str = scope["path"]
        request_id = request_id_of(scope["headers"])
        response = Response(send, request_id, self._dispatcher.state)
        try:
            if self._options.api_key is not None and path not in OPEN_PATHS:
                require_key(scope["headers"], self._options.api_key)
            if path == "/predict":
                await self._predict(scope, receive, response, None, started_ns)
            elif path == self._infer_path:
                await self._infer(scope, receive, response)
            elif path.startswith("/predict/"):
                await self._predict(scope, receive, response, path.removeprefix("/predict/"), started_ns)
            else:
                await self._app(scope, bounded(receive, self._options.max_body_bytes), response.forward)
                response.raise_for_held(scope)
        except Disconnected:
            return
        except Exception as error:
            if code_of(error) == "internal":
                log.exception("request %s failed", request_id.decode("latin-1"))
            if response.is_started:  # too late for another status; the connection is cut instead
                raise
            await response.error(error)

    async def _predict(
        self, scope: Scope, receive: Receive, response: "Response", backend: str | None, started_ns: int
    ) -> None:
        options = self._options
        body = await self._body(scope, receive)
        request = schemas.parse_predict(body, options.width_in, options.max_request_rows)
        if backend is not None:
            if request.backend not in (None, backend):
                raise BadRequestError(f"backend: the path asks for {backend!r} and the body for {request.backend!r}")
            request.backend = backend
        result = await self._dispatcher.infer(request)
        schemas.require_finite(result.rows)
        reply: dict[str, Any] = {"outputs": result.rows.reshape(*request.shape, result.rows.shape[1])}
        if options.labels:
            reply["labels"] = schemas.labels_of(result.rows, options.labels, request.shape)
        reply["backend"] = result.backend
        reply["implementation"] = result.implementation
        if request.id is not None:
            reply["id"] = request.id
        reply["timing"] = {
            "queue_ms": result.queue_ns / 1e6,
            "compute_ms": result.compute_ns / 1e6,
            "total_ms": (time.monotonic_ns() - started_ns) / 1e6,
            "batch_rows": result.batch_rows,
        }
        await response.json(reply, result_headers(result))

    async def _infer(self, scope: Scope, receive: Receive, response: "Response") -> None:
        options = self._options
        declared = [value for name, value in scope["headers"] if name == openinference.LENGTH_HEADER]
        json_bytes = openinference.json_length(declared[0]) if declared else None
        body = await self._body(scope, receive, is_json=json_bytes is None)
        request = openinference.parse_infer(body, options.width_in, options.max_request_rows, json_bytes)
        result = await self._dispatcher.infer(request)
        reply: dict[str, Any] = {"model_name": options.model}
        if request.id is not None:
            reply["id"] = request.id
        reply["parameters"] = {"backend": result.backend, "implementation": result.implementation}
        output = {"name": openinference.OUTPUT, "datatype": "FP32", "shape": [*request.shape, result.rows.shape[1]]}
        if request.is_binary_reply:
            reply["outputs"] = [output | {"parameters": {"binary_data_size": result.rows.nbytes}}]
            await response.binary(reply, result.rows.data.cast("B"), result_headers(result))
        else:
            schemas.require_finite(result.rows)
            reply["outputs"] = [output | {"data": result.rows.reshape(-1)}]
            await response.json(reply, result_headers(result))

    async def _body(self, scope: Scope, receive: Receive, is_json: bool = True) -> bytes | bytearray:
        """Check the method and the headers, then read the body.

        Raises:
            MethodNotAllowedError, UnsupportedMediaTypeError, TooLargeError: as their names say.
            Disconnected: the client went away.
        """
        if scope["method"] != "POST":
            raise MethodNotAllowedError(f"{scope['path']}: expected POST, got {scope['method']}", "POST")
        limit = self._options.max_body_bytes
        declared, is_sent_unasked = 0, True
        for name, value in scope["headers"]:
            if name == b"content-type" and is_json:
                schemas.require_json(value.decode("latin-1"))
            elif name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise UnsupportedMediaTypeError(
                    f"content-encoding: expected an uncompressed body, got {value.decode('latin-1')}"
                )
            elif name == b"content-length":
                declared = int(value)
            elif name == b"expect":
                is_sent_unasked = False
        if declared > limit:
            if is_sent_unasked:
                await discard(receive)
            raise TooLargeError(f"expected a body of at most {limit} bytes, got {declared}")
        message = await receive()
        first: bytes = message.get("body", b"")
        if message["type"] == "http.request" and not message.get("more_body") and len(first) <= limit:
            return first
        body = bytearray()
        while True:
            if message["type"] == "http.disconnect":
                raise Disconnected
            body += message.get("body", b"")
            if len(body) > limit:
                await discard(receive)
                raise TooLargeError(f"expected a body of at most {limit} bytes, got more")
            if not message.get("more_body"):
                return body
            message = await receive()


def request_id_of(headers: Iterable[Header]) -> bytes:
    """Return the caller's `x-request-id` where it is a plain token, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and REQUEST_ID.fullmatch(value):
            return value
    return os.urandom(8).hex().encode()


def require_key(headers: Iterable[Header], key: str) -> None:
    """Compare the caller's key in constant time.

    Raises:
        UnauthorizedError: none came, or another one.
    """
    given = dict(headers)
    scheme, _, bearer = given.get(b"authorization", b"").partition(b" ")
    token = given.get(b"x-api-key", bearer if scheme.lower() == b"bearer" else b"")
    if not hmac.compare_digest(token, key.encode()):
        raise UnauthorizedError("expected this server's key in the header X-API-Key, or as Authorization: Bearer <key>")


async def discard(receive: Receive) -> None:
    """Read and forget the rest of a refused body, within bounds.

    A client that is still sending when the connection closes sees a reset instead of the reply.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_S):
            discarded = 0
            while discarded < DISCARD_BYTES:
                message = await receive()
                discarded += len(message.get("body", b""))
                if not message.get("more_body"):
                    return


def result_headers(result: Result) -> list[Header]:
    """Return the headers that every inference reply carries."""
    return [
        (b"x-backend", result.backend.encode()),
        (b"x-implementation", result.implementation.encode()),
        (b"x-queue-us", b"%d" % (result.queue_ns // 1000)),
        (b"x-compute-us", b"%d" % (result.compute_ns // 1000)),
        (b"x-batch-rows", b"%d" % result.batch_rows),
    ]


def bounded(receive: Receive, max_bytes: int) -> Receive:
    """Wrap the way in, so that no route reads more of a body than the bound."""
    received = 0

    async def bounded_receive() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            await discard(receive)
            raise TooLargeError(f"expected a body of at most {max_bytes} bytes, got more")
        return message

    return bounded_receive
