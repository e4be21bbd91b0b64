"""A server in a few lines that answers as this project's does, and on demand as none should: over raw sockets."""

import contextlib
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

WIDTH = 4
LENGTH = "inference-header-content-length"
STAGES = {"x-queue-us": "10", "x-batch-us": "1", "x-compute-us": "20", "x-encode-us": "2", "x-batch-rows": "1"}

# What is sent for the right reply to a path, the first, second and so on of its kind; a tuple: in pieces, with a pause
# between them; None: the connection is closed.
Fault = Callable[[str, int, bytes], bytes | tuple[bytes, ...] | None]
PAUSE_S = 0.005


def reply(body: bytes, headers: dict[str, str] | None = None, status: str = "200 OK") -> bytes:
    lines = {"content-length": str(len(body))} | (headers or {})
    head = "\r\n".join([f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in lines.items())])
    return head.encode() + b"\r\n\r\n" + body


def document(of: object, status: str = "200 OK") -> bytes:
    return reply(json.dumps(of).encode(), status=status)


def answer(path: str, headers: dict[str, str], body: bytes) -> bytes:
    """What is right: the rows themselves."""
    if path == "/predict/fused" or path == "/predict/eager":
        rows = json.loads(body)["inputs"]
        backend = path.rpartition("/")[2]
        return reply(json.dumps({"outputs": rows}).encode(), STAGES | {"x-backend": backend})
    if path == "/v2/models/m/infer":
        length = int(headers[LENGTH])
        backend = json.loads(body[:length])["parameters"]["backend"]
        return reply(b"{}" + body[length:], STAGES | {"x-backend": backend, LENGTH: "2"})
    metadata = [{"shape": [-1, WIDTH]}]
    states = {name: {"implementation": "torch", "state": "ready"} for name in ("eager", "fused")}
    told: dict[str, object] = {
        "/v2/health/ready": {"ready": True},
        "/model": {"name": "m", "dtype": "float32", "max_request_rows": 64},
        "/v2/models/m": {"inputs": metadata, "outputs": metadata},
        "/backend": {"backends": states},
    }
    return document(told[path]) if path in told else document({"error": "no", "code": "not_found"}, "404 Not Found")


def no_fault(_path: str, _number: int, right: bytes) -> bytes | None:
    return right


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    fault: Fault

    def __init__(self, fault: Fault) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault = fault
        self.counts: dict[str, int] = {}
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: object) -> None:
        pass


class Handler(socketserver.StreamRequestHandler):
    server: Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        while request := self.rfile.readline():
            path = request.split()[1].decode()
            headers: dict[str, str] = {}
            while (line := self.rfile.readline().decode().strip()) != "":
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            body = self.rfile.read(int(headers.get("content-length", 0)))
            self.server.counts[path] = number = self.server.counts.get(path, 0) + 1
            sent = self.server.fault(path, number, answer(path, headers, body))
            if sent is None:
                return
            first, *others = (sent,) if isinstance(sent, bytes) else sent
            self.wfile.write(first)
            for piece in others:
                time.sleep(PAUSE_S)
                self.wfile.write(piece)


@contextlib.contextmanager
def faulty_server(fault: Fault = no_fault) -> Iterator[Server]:
    with Server(fault) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def slowly(seconds: float) -> Fault:
    """Every inference but the first few takes so long."""

    def fault(path: str, number: int, right: bytes) -> bytes | None:
        if path.startswith("/predict") and number > 1:
            time.sleep(seconds)
        return right

    return fault


def finite(values: object) -> bool:
    return bool(np.isfinite(np.asarray(values)).all())
