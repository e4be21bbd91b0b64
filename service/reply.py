"""A reply as plain data, and the one form of errors."""

from typing import Any, NamedTuple

import orjson

from service.errors import RETRY_AFTER_S, STATUS, MethodNotAllowedError, code_of, message_of

Header = tuple[bytes, bytes]
Content = tuple[bytes, bytes]
"""The header lines that describe a body, and the body."""

CLOSE = b"connection: close\r\n"


class Reply(NamedTuple):
    """A whole reply; whoever sends it adds the request's id, and closes the connection if necessary.

    Attributes:
        status: HTTP's.
        head: header lines, each with its line end; what many replies share is formatted only once.
        body: the bytes.
    """

    status: int
    head: bytes
    body: bytes

    @property
    def headers(self) -> list[Header]:
        """The header lines as ASGI takes them."""
        lines = (line.partition(b": ") for line in self.head.split(b"\r\n")[:-1])
        return [(name, value) for name, _, value in lines]


def json_content(document: Any) -> Content:
    """Write a JSON document; arrays are written as nested numbers."""
    body = orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"content-type: application/json\r\ncontent-length: %d\r\n" % len(body), body


def binary_content(json_part: bytes, data: memoryview) -> Content:
    """Write a JSON part and the binary data that it describes."""
    body = b"".join((json_part, data))
    return (
        b"content-type: application/octet-stream\r\ninference-header-content-length: %d\r\ncontent-length: %d\r\n"
        % (len(json_part), len(body))
    ), body


def error_reply(error: BaseException) -> Reply:
    """Return `{"error": sentence, "code": slug}` with the status that the table gives the code."""
    code = code_of(error)
    head = b""
    if code in RETRY_AFTER_S:
        head += b"retry-after: %d\r\n" % RETRY_AFTER_S[code]
    if isinstance(error, MethodNotAllowedError):
        head += b"allow: %b\r\n" % error.allowed.encode("latin-1")
    if code == "unauthorized":
        head += b"www-authenticate: Bearer\r\n"
    if code == "too_large":
        head += CLOSE  # what is left of the body is not read
    lines, body = json_content({"error": message_of(error), "code": code})
    return Reply(STATUS[code], lines + head, body)
