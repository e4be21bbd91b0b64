"""What the server adds to HTTP itself: one request at a time against a bare echo of the same bytes, interleaved.

Measured with two clients: a raw socket, which costs next to nothing, so that the ratio is the harshest possible; and
the standard library's `http.client`, as a caller in Python would see it.
"""

import http.client
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from tqdm import tqdm

from loadtests.connection import Connection, UnexpectedReplyError, post
from loadtests.server_process import ServerProcess

ROUNDS = 20
WARM_UP_REQUESTS = 200
PATH = "/predict"


@dataclass(frozen=True, slots=True)
class Overhead:
    """Medians in microseconds over all requests; ratios per round, of which the median and the extremes are kept."""

    client: str
    requests: int
    backend: str
    echo_us: float
    server_us: float
    ratio: float
    ratio_min: float
    ratio_max: float


def measure(requests: int = 4000) -> list[Overhead]:
    """Start both servers and send `requests` to each with each client, a round of one after a round of the other.

    The body is one row of the demo model's width. The client shares the servers' cores. `compiled`, which takes a while
    to be ready and is never the default where `fused` is there, is left out.

    Raises:
        ServerStartError, UnexpectedReplyError, OSError: a server does not start, or does not answer.
    """
    body = json.dumps({"inputs": [float(value % 17) for value in range(64)]}).encode()
    with ServerProcess(echo_command, "/") as echo, ServerProcess.service("--backends", "eager,fused") as server:
        backend = str(server.get_json("/backend")["default"])
        return [
            compared(name, requests, backend, timer(echo.port, body), timer(server.port, body))
            for name, timer in (("raw socket", raw_socket), ("http.client", standard_client))
        ]


def echo_command(port: int) -> list[str]:
    """Return what starts the bare echo."""
    command = [sys.executable, "-m", "uvicorn", "loadtests.peers.programs.echo:app", "--port", str(port)]
    return [*command, "--no-access-log", "--log-level", "warning", "--loop", "uvloop", "--http", "httptools"]


def compared(
    client: str, requests: int, backend: str, time_echo: Callable[[], int], time_server: Callable[[], int]
) -> Overhead:
    """Time both in alternating rounds."""
    for _ in range(WARM_UP_REQUESTS):
        time_echo()
        time_server()
    echo_ns: list[list[int]] = []
    server_ns: list[list[int]] = []
    for _ in tqdm(range(ROUNDS), desc=client, unit="round"):
        echo_ns.append([time_echo() for _ in range(requests // ROUNDS)])
        server_ns.append([time_server() for _ in range(requests // ROUNDS)])
    ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(echo_ns, server_ns, strict=True)]
    return Overhead(
        client=client,
        requests=requests,
        backend=backend,
        echo_us=statistics.median(itertools.chain.from_iterable(echo_ns)) / 1e3,
        server_us=statistics.median(itertools.chain.from_iterable(server_ns)) / 1e3,
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )


def raw_socket(port: int, body: bytes) -> Callable[[], int]:
    """Return what times one request over a raw socket, in nanoseconds."""
    connection, request = Connection("127.0.0.1", port), post(PATH, body)
    return lambda: connection.time_ns(request)


def standard_client(port: int, body: bytes) -> Callable[[], int]:
    """Return what times one request of the standard library's client, in nanoseconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)

    def time_ns() -> int:
        start = time.perf_counter_ns()
        connection.request("POST", PATH, body, {"content-type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        if reply.status != 200:
            raise UnexpectedReplyError(f"expected status 200, got {reply.status}")
        return time.perf_counter_ns() - start

    return time_ns
