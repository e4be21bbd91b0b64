"""uvicorn's HTTP protocol, with the one form that errors have for bytes that are no HTTP."""

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
)


class Protocol(HttpToolsProtocol):
    """Answers what cannot be parsed, before there is a request that the app could see."""

    def send_400_response(self, msg: str) -> None:
        """Answer and close the connection."""
        body = orjson.dumps(
            {"error": f"expected an HTTP/1.1 request, got bytes that are none: {msg}", "code": "bad_request"}
        )
        self.transport.write(BAD_REQUEST % (len(body), body))
        self.transport.close()
