"""The server under load, and the requests that are sent to it: the same in every process, from a seed."""

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from loadtests.connection import Connection, UnexpectedReplyError, post, status_of
from loadtests.errors import LoadTestError
from loadtests.inference import Inference, inference

POOL_ROWS = 61  # a prime, so that requests of any size begin at every row of the pool in turn
PAYLOADS = 16  # different requests, or fewer where they are large
PAYLOAD_ROWS = 2048  # of all of them
ANSWER_LIMIT_S = 30.0


class TargetError(LoadTestError):
    """The server cannot be reached, is not ready, or does not have what is to be measured."""


@dataclass(frozen=True, slots=True)
class Payload:
    """One request as bytes, and the rows of the pool that it holds."""

    inference: Inference
    request: bytes
    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and what to ask of it."""

    host: str
    port: int
    model: str
    wire: str
    width_in: int
    width_out: int
    seed: int
    key: str = ""

    def connect(self) -> Connection:
        """Return a new connection.

        Raises:
            OSError: nobody listens.
        """
        return Connection(self.host, self.port, ANSWER_LIMIT_S)

    @property
    def url(self) -> str:
        """The server's address."""
        return url_of(self.host, self.port)

    def ask(self, connection: Connection, request: bytes, what: str) -> tuple[bytes, bytes]:
        """Return head and body of the reply to a request that is no part of a load; `what` says which.

        Raises:
            TargetError: there was none.
        """
        try:
            connection.require_open()
            return connection.exchange(request)
        except (OSError, UnexpectedReplyError) as error:
            raise TargetError(f"{self.url}: {what}: no reply: {error}") from error

    def message(self) -> dict[str, Any]:
        """Return it as locust's messages carry it."""
        return asdict(self)

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> Self:
        """Return what `message` made."""
        return cls(**message)


def address(url: str) -> tuple[str, int]:
    """Return the host and the port of a URL.

    Raises:
        TargetError: it is none that can be loaded.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, 80 if parts.port is None else parts.port
    except ValueError as error:
        raise TargetError(f"--url {url}: {error}") from error
    more = parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None
    if parts.scheme != "http" or not host or not port or more or not (url.isascii() and url.isprintable()):
        raise TargetError(f"--url: expected the server's address, such as http://127.0.0.1:8000, got {url!r}")
    return host, port


def url_of(host: str, port: int) -> str:
    """Return the address as it is written; one of IP version 6 stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def pool(target: Target) -> NDArray[np.float32]:
    """Return the rows that all requests are made of, (POOL_ROWS, width_in)."""
    random = np.random.default_rng(target.seed)
    return random.uniform(-1, 1, (POOL_ROWS, target.width_in)).astype(np.float32)


@cache
def payloads(target: Target, backend: str, rows: int) -> list[Payload]:
    """Return the requests of `rows` rows each that are sent to `backend` in turn."""
    source, made = pool(target), []
    for start in range(0, max(2, min(PAYLOADS, PAYLOAD_ROWS // rows)) * rows, rows):
        picked = tuple((start + offset) % POOL_ROWS for offset in range(rows))
        made.append(payload(target, backend, picked, target.wire, source))
    return made


def payload(target: Target, backend: str, picked: tuple[int, ...], wire: str, source: NDArray[np.float32]) -> Payload:
    """Return the request for some rows of the pool."""
    asked = inference(wire, target.model, source[list(picked)], target.width_out, backend, target.key)
    return Payload(asked, post(asked.path, asked.body, asked.headers, target.url.removeprefix("http://")), picked)


def get(host: str, port: int, path: str, key: str = "") -> tuple[int, bytes]:
    """Return status and body of a GET.

    Raises:
        TargetError: there was no reply.
    """
    url = url_of(host, port)
    head = f"GET {path} HTTP/1.1\r\nhost: {url.removeprefix('http://')}\r\naccept-encoding: identity\r\n"
    head += f"x-api-key: {key}\r\n" if key else ""
    try:
        with Connection(host, port, ANSWER_LIMIT_S) as connection:
            reply, body = connection.exchange(head.encode() + b"\r\n")
            return status_of(reply), body
    except (OSError, ValueError, UnexpectedReplyError) as error:
        raise TargetError(f"{url}: expected a server, got no reply: {error}") from error
