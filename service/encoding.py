"""Compressed request bodies: `content-encoding` gzip or deflate, never unpacked beyond the bound on a body.

Source: RFC 9110, section 8.4.1; "deflate" is taken with its zlib frame and, as browsers do, without.
"""

import zlib

from service.errors import BadRequestError, TooLargeError, UnsupportedMediaTypeError
from service.schemas import shortened

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def decoded(body: bytes | bytearray, encoding: bytes, limit: int) -> bytes | bytearray:
    """Undo a body's encoding.

    Args:
        body: as it came.
        encoding: the value of `content-encoding`.
        limit: most bytes that come out.

    Raises:
        UnsupportedMediaTypeError: an encoding other than gzip, deflate or identity, or several.
        BadRequestError: the body is not in this encoding, or cut off, or something follows it.
        TooLargeError: more than `limit` bytes come out.
    """
    name = encoding.decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return body
    if name not in WINDOW_BITS:
        raise UnsupportedMediaTypeError(f"content-encoding: expected gzip, deflate or none, got {shortened(name)}")
    is_bare = name == "deflate" and (len(body) < 2 or body[0] & 15 != 8 or (body[0] << 8 | body[1]) % 31)
    unpacker = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else WINDOW_BITS[name])
    try:
        plain = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise BadRequestError(f"the body is not {name} data, as its content-encoding says: {error}") from None
    if len(plain) > limit:
        raise TooLargeError(f"expected a body of at most {limit} bytes, got more once it was unpacked")
    if not unpacker.eof:
        raise BadRequestError(f"the body's {name} data is cut off")
    if unpacker.unused_data:
        raise BadRequestError(f"expected nothing after the body's {name} data, got {len(unpacker.unused_data)} bytes")
    return plain
