"""One usual inference request and its reply, without ASGI, a task or a future."""

import time
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol

from service.dispatch import Ticket
from service.headers import request_id_of
from service.inference import Inference, Operation
from service.reply import Reply

REMEMBERED_HEADS = 256
REMEMBERED_HEAD_BYTES = 2 << 10


class Head(NamedTuple):
    """What the line and the headers of a usual inference request say.

    Attributes:
        operation: what is asked for.
        headers: by lower-case name.
        length: the body's, in bytes.
        keep_alive: whether the connection stays open after the reply.
        refusal: why the request is refused whatever its body is.
    """

    operation: Operation
    headers: Mapping[bytes, bytes]
    length: int
    keep_alive: bool
    refusal: Exception | None


class Heads:
    """The most recent heads, by their bytes: a client's requests mostly begin alike, and need parsing only once.

    Only heads that were let in are remembered, and only if every line ends in CR LF and nothing else does, so that it
    is certain where they end. The parser keeps no state between requests, so it does no harm that it does not see one.
    """

    def __init__(self) -> None:
        self._heads: dict[bytes, Head] = {}

    def get(self, data: bytes) -> Head | None:
        """Return the head with these bytes, if it is remembered."""
        return self._heads.get(data)

    def remember(self, data: bytes, head: Head) -> None:
        """Keep a head in place of the one that has been here longest."""
        if head.refusal is not None or len(data) > REMEMBERED_HEAD_BYTES:
            return
        if not data.endswith(b"\r\n\r\n") or not data.count(b"\n") == data.count(b"\r") == len(head.headers) + 2:
            return  # also a head with a header twice
        if len(self._heads) >= REMEMBERED_HEADS:
            del self._heads[next(iter(self._heads))]
        self._heads[data] = head


class Carrier(Protocol):
    """The connection that an exchange came over."""

    inference: ClassVar[Inference]

    def write_reply(self, reply: Reply, request_id: bytes, keep_alive: bool) -> None:
        """Write the whole reply."""


class NoEvent:
    """Stands in for the event that wakes an ASGI app, where there is no app."""

    def set(self) -> None:
        """Do nothing."""


class Exchange:
    """One usual inference request and its reply; uvicorn's protocol takes it for a `RequestResponseCycle`."""

    __slots__ = (
        "_carrier",
        "_headers",
        "_operation",
        "_parts",
        "_refusal",
        "_request_id",
        "_started_ns",
        "_ticket",
        "is_disconnected",
        "keep_alive",
        "more_body",
        "response_complete",
    )
    message_event = NoEvent()

    def __init__(self, carrier: Carrier, head: Head) -> None:
        self._carrier = carrier
        self._operation = head.operation
        self._headers = head.headers
        self._parts: list[bytes] = []
        self._started_ns = time.monotonic_ns()
        self._request_id = request_id_of(head.headers)
        self._ticket: Ticket | None = None
        self.is_disconnected = False
        self.keep_alive = head.keep_alive
        self.more_body = True
        self.response_complete = False
        self._refusal = head.refusal

    @property
    def disconnected(self) -> bool:
        """Whether the client is gone."""
        return self.is_disconnected

    @disconnected.setter
    def disconnected(self, value: bool) -> None:
        self.is_disconnected = value
        if value and self._ticket is not None:
            self._carrier.inference.abandon(
                self._ticket, self._operation, self._headers, self._request_id, self._started_ns
            )

    @property
    def is_alone(self) -> bool:
        """Whether its worker has no other request of this process."""
        return self._ticket is not None and self._ticket.is_alone

    def feed(self, data: bytes) -> None:
        """Take a part of the body; if the request is refused by its head, the part is dropped."""
        if self._refusal is None:
            self._parts.append(data)

    def begin(self) -> None:
        """Act on the request, now that it is whole."""
        if self.response_complete:
            return
        self.more_body = False
        if self._refusal is not None:
            self.refuse(self._refusal)
            return
        body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._ticket = self._carrier.inference.start(
            self._operation, self._headers, body, self._request_id, self._started_ns, self.send
        )

    def refuse_by_head(self) -> None:
        """Answer, if that has not happened, a request that its head refuses; what comes of the body is dropped."""
        if self._refusal is not None and not self.response_complete and not self.is_disconnected:
            self._refuse(self._refusal)

    def refuse(self, error: Exception) -> None:
        """Answer with an error, whether the request is whole or not."""
        self.keep_alive = self.keep_alive and not self.more_body
        self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        self.send(
            self._carrier.inference.refuse(error, self._operation, self._headers, self._request_id, self._started_ns)
        )

    def send(self, reply: Reply) -> None:
        """Write the reply and end the exchange."""
        self._ticket = None
        self.response_complete = True
        if not self.is_disconnected:
            self._carrier.write_reply(reply, self._request_id, self.keep_alive)
