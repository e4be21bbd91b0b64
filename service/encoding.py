"""Compressed request bodies: `content-encoding` gzip or deflate, never decompressed beyond the bound on a body.

Source: RFC 9110, section 8.4.1, and RFC 1952, section 2.2: gzip data is one member or several. "deflate" is accepted
with its zlib frame and, as browsers do, without.
"""

import zlib

from service.errors import BadRequestError, TooLargeError, UnsupportedMediaTypeError
from service.schemas import shortened

WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
GZIP_MAGIC = b"\x1f\x8b"
MAX_MEMBERS = 1024  # of 64 KiB, as those who pack in parallel make them, more than a body has
PIECE_BYTES = 64 << 10  # unpacked at once; zlib copies what of them follows a member


def require_known(encoding: bytes) -> str:
    """Return the name of a body's encoding; an empty one where it has none.

    Raises:
        UnsupportedMediaTypeError: an encoding other than gzip, deflate or identity, or several.
    """
    name = encoding.decode("latin-1").strip().lower()
    if name in ("", "identity"):
        return ""
    if name not in WINDOW_BITS:
        raise UnsupportedMediaTypeError(f"content-encoding: expected gzip, deflate or none, got {shortened(name)}")
    return name


def decoded(body: bytes | bytearray, encoding: bytes, limit: int) -> bytes | bytearray:
    """Undo a body's encoding.

    Args:
        body: as it came.
        encoding: the value of `content-encoding`.
        limit: most bytes that come out.

    Raises:
        UnsupportedMediaTypeError: as `require_known`.
        BadRequestError: the body is not in this encoding, is cut off, is followed by something else, or has more than
            `MAX_MEMBERS` members of gzip.
        TooLargeError: more than `limit` bytes come out.
    """
    name = require_known(encoding)
    if not name:
        return body
    is_bare = name == "deflate" and (len(body) < 2 or body[0] & 15 != 8 or (body[0] << 8 | body[1]) % 31)
    window_bits = -zlib.MAX_WBITS if is_bare else WINDOW_BITS[name]
    plain = bytearray()
    end = 0
    try:
        for _ in range(MAX_MEMBERS):
            end = _unpack_member(plain, body, end, window_bits, limit)
            if end == len(body):
                return plain
            if name == "deflate" or body[end : end + len(GZIP_MAGIC)] != GZIP_MAGIC:
                raise BadRequestError(f"expected nothing after the body's {name} data, got {len(body) - end} bytes")
    except zlib.error as error:
        raise BadRequestError(f"the body is not {name} data, as its content-encoding says: {error}") from None
    except EOFError:
        raise BadRequestError(f"the body's {name} data is cut off") from None
    raise BadRequestError(f"expected a body of at most {MAX_MEMBERS} members of {name}, got more; pack it as one")


def _unpack_member(plain: bytearray, body: bytes | bytearray, start: int, window_bits: int, limit: int) -> int:
    """Unpack what begins at `start`, add it to `plain`, and return where it ends.

    Raises:
        zlib.error: it is not packed so.
        EOFError: it is cut off.
        TooLargeError: `plain` would have more than `limit` bytes.
    """
    unpacker = zlib.decompressobj(window_bits)
    while not unpacker.eof:
        if start == len(body):
            raise EOFError
        piece = body[start : start + PIECE_BYTES]
        plain += unpacker.decompress(piece, limit + 1 - len(plain))
        if len(plain) > limit:
            raise TooLargeError(f"expected a body of at most {limit} bytes, got more once it was unpacked")
        start += len(piece) - len(unpacker.unused_data)
    return start
