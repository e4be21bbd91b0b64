"""Sends the reply to a request over ASGI: adds common headers, and gives the host framework's errors our form."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson
from starlette.routing import Match

from service.errors import (
    BadRequestError,
    InternalError,
    MethodNotAllowedError,
    NotFoundError,
    NotReadyError,
    ServiceError,
    TooLargeError,
    UnauthorizedError,
    UnsupportedMediaTypeError,
    clipped,
)
from service.reply import CLOSE, Header, Reply
from service.shared_state import SharedState

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SCOPE_REQUEST_ID = "mlp.request_id"  # what the front adds to a scope that it passes on: the reply's x-request-id, bytes
HOST_ERRORS: dict[int, type[ServiceError]] = {
    400: BadRequestError,
    401: UnauthorizedError,
    413: TooLargeError,
    415: UnsupportedMediaTypeError,
    422: BadRequestError,
    503: NotReadyError,
}


class Response:
    """Sends one reply: ours, or one of the host framework's, whose errors it holds back."""

    def __init__(self, send: Send, request_id: bytes, state: SharedState, is_unread: bool = False) -> None:
        """A reply closes its connection if `state` says that the server is draining, or if the body `is_unread`."""
        self.is_unread = is_unread
        self._send = send
        self._state = state
        self._common: list[Header] = [(b"x-request-id", request_id)]
        self._held: Message | None = None  # the start of an error reply of the host
        self._held_body = bytearray()
        self.is_started = False

    async def send(self, reply: Reply) -> None:
        """Send a reply of our own."""
        self.is_started = True
        common = self._common if CLOSE in reply.head else self._headers()
        headers = [*reply.headers, *common]
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": reply.body})

    async def forward(self, message: Message) -> None:
        """Pass on a reply of the host, but hold back an error."""
        if message["type"] == "http.response.start":
            if message["status"] >= 400:
                self._held = message
                return
            message["headers"] = [*message.get("headers", []), *self._headers()]
            self.is_started = True
        elif self._held is not None:
            self._held_body += message.get("body", b"")
            return
        await self._send(message)

    def raise_for_held(self, scope: Scope) -> None:
        """Raise the error reply that was held back, if any, as the corresponding error of ours.

        Raises:
            ServiceError: the one for its status.
        """
        if self._held is None:
            return
        status: int = self._held["status"]
        if status == 404:
            raise NotFoundError(f"no such route: {clipped(scope['path'])}; GET /docs lists them all")
        if status == 405:
            allowed = ", ".join(sorted(allowed_methods(scope)))
            raise MethodNotAllowedError(f"{clipped(scope['path'])}: expected {allowed}, got {scope['method']}", allowed)
        detail = host_detail(bytes(self._held_body))
        if status in HOST_ERRORS:
            raise HOST_ERRORS[status](detail)
        raise InternalError(f"{scope['path']}: the host framework answered {status}: {detail}")

    def _headers(self) -> list[Header]:
        is_last = self._state.is_draining or self.is_unread
        return [*self._common, (b"connection", b"close")] if is_last else self._common


def allowed_methods(scope: Scope) -> set[str]:
    """Return the methods of all the app's routes with this path; the app's own answer names only the first one's."""
    routes = (route for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE)
    methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
    return methods | {"HEAD"} if "GET" in methods else methods  # which the front answers as GET


def host_detail(body: bytes) -> str:
    """Find the sentence in an error body of FastAPI's or LitServe's."""
    try:
        detail = orjson.loads(body)["detail"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
    if isinstance(detail, list) and detail and isinstance(detail[0], dict):
        where = ".".join(str(part) for part in detail[0].get("loc", ()) if part != "body")
        return f"{where}: {detail[0].get('msg')}" if where else str(detail[0].get("msg"))
    return str(detail)
