"""A reply as plain data, and the one form that errors have."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import orjson

from service.errors import RETRY_AFTER_S, STATUS, MethodNotAllowedError, code_of, message_of

Header = tuple[bytes, bytes]

JSON_HEADER = (b"content-type", b"application/json")
BINARY_HEADER = (b"content-type", b"application/octet-stream")


class Reply(NamedTuple):
    """A whole reply; whoever sends it adds the request's id, and closes the connection where it has to."""

    status: int
    headers: list[Header]
    body: bytes


def json_reply(document: Any, headers: Iterable[Header] = (), status: int = 200) -> Reply:
    """Return a JSON reply; arrays are written as nested numbers."""
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return Reply(status, [JSON_HEADER, (b"content-length", b"%d" % len(body)), *headers], body)


def binary_reply(document: Any, data: memoryview, headers: Iterable[Header]) -> Reply:
    """Return a JSON part and the binary data that it describes."""
    head = orjson.dumps(document)
    body = b"".join((head, data))
    lengths = [(b"inference-header-content-length", b"%d" % len(head)), (b"content-length", b"%d" % len(body))]
    return Reply(200, [BINARY_HEADER, *lengths, *headers], body)


def error_reply(error: BaseException) -> Reply:
    """Return `{"error": sentence, "code": slug}` with the status that the table gives the code."""
    code = code_of(error)
    headers: list[Header] = []
    if code in RETRY_AFTER_S:
        headers.append((b"retry-after", b"%d" % RETRY_AFTER_S[code]))
    if isinstance(error, MethodNotAllowedError):
        headers.append((b"allow", error.allowed.encode("latin-1")))
    if code == "unauthorized":
        headers.append((b"www-authenticate", b"Bearer"))
    if code == "too_large":
        headers.append((b"connection", b"close"))  # what is left of the body is not read
    return json_reply({"error": message_of(error), "code": code}, headers, STATUS[code])
