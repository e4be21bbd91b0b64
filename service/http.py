"""The raw ASGI front: the entry for every request but the usual inference request.

It stands outside the middleware of LitServe's FastAPI app, so every error of every route leaves through it and in the
same form. Inference requests that `service.protocol` does not handle itself are read here and answered by the same
operations; requests to all other routes are passed on to the app.
"""

import asyncio
import logging
import time

from starlette.requests import ClientDisconnect

from service import page
from service.errors import MethodNotAllowedError, TooLargeError, clipped, code_of
from service.headers import Headers, declared_length, headers_of, request_id_of, require_length, require_plain_transfer
from service.inference import Inference, Operation, logged_reply
from service.reply import Reply
from service.response import SCOPE_REQUEST_ID, App, Message, Receive, Response, Scope, Send

OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready", "/health"}) | page.PATHS
log = logging.getLogger(__name__)


class Front:
    """ASGI middleware; one instance per API process, made before the fork and started by the lifespan."""

    def __init__(self, app: App, inference: Inference) -> None:
        """`app` answers the other routes."""
        self._app = app
        self._inference = inference

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_ns = time.monotonic_ns()
        path: str = scope["path"]
        headers = headers_of(scope["headers"])
        request_id = request_id_of(headers)
        limit = self._inference.options.max_body_bytes
        is_unread = b"expect" in headers or declared_length(headers) > limit
        response = Response(send, request_id, self._inference.dispatcher.state, is_unread)
        operation = self._inference.operation(path)
        try:
            if path not in OPEN_PATHS:
                self._inference.require_key(headers)
            require_plain_transfer(headers)
            if operation is None:
                inner = {**scope, "headers": list(headers.items()), SCOPE_REQUEST_ID: request_id}
                if scope["method"] == "HEAD":  # answered as GET is; the server, by its own scope, leaves the body out
                    inner["method"] = "GET"
                await self._app(inner, bounded(receive, headers, limit), response.forward)
                response.raise_for_held(inner)
                return
            if scope["method"] != "POST":
                raise MethodNotAllowedError(f"{clipped(path)}: expected POST, got {scope['method']}", "POST")
            operation.check(headers)
            body = await whole(bounded(receive, headers, limit))
            response.is_unread = False
            await response.send(await self._run(operation, headers, body, request_id, started_ns, receive))
        except ClientDisconnect:  # nobody is left to answer
            return
        except Exception as error:
            if response.is_started:  # too late for another status; the connection is cut instead
                if code_of(error) == "internal":
                    log.exception("request %s failed", request_id.decode("latin-1"))
                raise
            if operation is None:
                reply = logged_reply(error, request_id)
            else:
                reply = self._inference.refuse(error, operation, headers, request_id, started_ns)
            await response.send(reply)

    async def _run(
        self,
        operation: Operation,
        headers: Headers,
        body: bytes | bytearray,
        request_id: bytes,
        started_ns: int,
        receive: Receive,
    ) -> Reply:
        """Wait for the reply, or for the client to go away.

        Raises:
            ClientDisconnect: it has.
        """
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        ticket = self._inference.start(operation, headers, body, request_id, started_ns, reply.set_result)
        gone = asyncio.ensure_future(receive())
        try:
            await asyncio.wait((reply, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if reply.done():
            return reply.result()
        if ticket:
            self._inference.abandon(ticket, operation, headers, request_id, started_ns)
        raise ClientDisconnect


def bounded(receive: Receive, headers: Headers, max_bytes: int) -> Receive:
    """Wrap `receive`, so that no route reads more of a body than the bound, nor any of one that announces more."""
    received = 0

    async def bounded_receive() -> Message:
        nonlocal received
        require_length(headers, max_bytes)
        message = await receive()
        received += len(message.get("body", b""))
        if received > max_bytes:
            raise TooLargeError(f"expected a body of at most {max_bytes} bytes, got more")
        return message

    return bounded_receive


async def whole(receive: Receive) -> bytearray:
    """Read a body to its end.

    Raises:
        ClientDisconnect: the client went away before it had sent it all.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body
