"""The body of a request to one of the routes that FastAPI serves, which all take JSON."""

from starlette.requests import Request

from service.encoding import decoded, require_known
from service.schemas import require_json


async def json_body(request: Request, max_bytes: int) -> bytes | bytearray:
    """Read a body and undo its encoding, once the headers say that it is JSON.

    Args:
        request: whose body was not read before.
        max_bytes: most bytes that an encoded body may have once it is decoded.

    Raises:
        UnsupportedMediaTypeError: it is declared to be something else, or in an encoding that is not taken.
        BadRequestError, TooLargeError: as `decoded`.
        ClientDisconnect: the caller has gone.
    """
    require_json(request.headers.get("content-type", "").encode("latin-1"))
    encoding = request.headers.get("content-encoding", "").encode("latin-1")
    require_known(encoding)
    return decoded(await request.body(), encoding, max_bytes)
