"""What a request's headers say before its body is read: its id, its length, and why it is refused."""

import re
from collections.abc import Mapping, Sequence
from random import getrandbits

from service.errors import BadRequestError, TooLargeError, UnsupportedMediaTypeError
from service.schemas import shortened

HOST = re.compile(rb"(?:\[[0-9A-Za-z:.]+\]|(?:[\w.~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]*)?")
REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

Headers = Mapping[bytes, bytes]
"""Headers by lower-case name."""


def headers_of(lines: Sequence[tuple[bytes, bytes]]) -> Headers:
    """Return headers by name; one that came several times has all its values, in order, separated by commas.

    So one of two contradicting values is never mistaken for the only one: where one value is valid, several are not.

    Source: RFC 9110, section 5.2.
    """
    headers = dict(lines)
    if len(headers) == len(lines):
        return headers
    values: dict[bytes, list[bytes]] = {name: [] for name in headers}
    for name, value in lines:
        values[name].append(value)
    return {name: b", ".join(each) for name, each in values.items()}


def declared_length(headers: Headers) -> int:
    """Return the Content-Length, which the parser has checked to be a number; 0 where there is none."""
    return int(headers.get(b"content-length", b"").lstrip(b"0")[:20] or b"0")


def request_id_of(headers: Headers) -> bytes:
    """Return the caller's `x-request-id` where it is a plain token, else a new one."""
    given = headers.get(b"x-request-id")
    if given is not None and REQUEST_ID.fullmatch(given):
        return given
    return b"%016x" % getrandbits(64)


def require_plain_transfer(headers: Headers) -> None:
    """Refuse a transfer coding that nothing here undoes; only the parser's own, chunked, is taken.

    Source: RFC 9112, section 6.1.

    Raises:
        UnsupportedMediaTypeError: the transfer coding is another one.
    """
    coding = headers.get(b"transfer-encoding", b"chunked")
    if coding.lower() != b"chunked":
        raise UnsupportedMediaTypeError(
            f"transfer-encoding: expected chunked or none, got {shortened(coding.decode('latin-1'))}; tell what packs "
            "the body in content-encoding"
        )


def require_length(headers: Headers, limit: int) -> None:
    """Refuse a body by its announced length.

    Raises:
        TooLargeError: it is longer than `limit` bytes.
    """
    declared = declared_length(headers)
    if declared > limit:
        raise TooLargeError(f"expected a body of at most {limit} bytes, got {declared}")


def require_host(lines: Sequence[tuple[bytes, bytes]], version: str) -> None:
    """Refuse a request that leaves open which host it is for.

    Source: RFC 9112, section 3.2; RFC 3986, section 3.2.2.

    Raises:
        BadRequestError: it has several Host headers, one that is no host, or none in HTTP/1.1.
    """
    hosts = [value for name, value in lines if name == b"host"]
    if len(hosts) == 1:
        if HOST.fullmatch(hosts[0]):
            return
        raise BadRequestError(
            f"host: expected a name or an address, with or without a port, got {shortened(hosts[0].decode('latin-1'))}"
        )
    if hosts or version > "1.0":
        raise BadRequestError(
            f"expected one Host header, got {len(hosts) or 'none'}; send the server's name and port in one"
        )
