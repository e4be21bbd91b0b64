"""A proxy before a real server that changes its inference replies, as a faulty server would."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

Tamper = Callable[[str, int, dict[str, str], bytes], tuple[int, dict[str, str], bytes]]


@contextlib.contextmanager
def tampering_proxy(url: str, tamper: Tamper) -> Iterator[str]:
    """Give the URL of a proxy whose replies are what `tamper` makes of path, status, headers and body."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = 1 << 16

        def setup(self) -> None:
            super().setup()
            self.upstream = HTTPConnection(host, port, timeout=60)

        def finish(self) -> None:
            self.upstream.close()
            super().finish()

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            self.upstream.request(self.command, self.path, body, dict(self.headers))
            reply = self.upstream.getresponse()
            headers = {name.lower(): value for name, value in reply.getheaders()}
            status, headers, data = tamper(self.path, reply.status, headers, reply.read())
            self.send_response_only(status)
            for name, value in (headers | {"content-length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = pass_on  # noqa: N815  the names that the standard library calls

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()
            thread.join()
