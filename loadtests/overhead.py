"""What the server adds to HTTP itself: one request at a time against a bare echo of the same bytes, interleaved."""

import itertools
import json
import statistics
import sys
from dataclasses import dataclass

from loadtests.connection import Connection, post
from loadtests.server_process import ServerProcess, free_port

ROUNDS = 20
WARM_UP_REQUESTS = 200


@dataclass(frozen=True, slots=True)
class Overhead:
    """Medians in microseconds over all requests; ratios per round, of which the median and the extremes are kept."""

    requests: int
    echo_us: float
    server_us: float
    ratio: float
    ratio_min: float
    ratio_max: float
    backend: str


def measure(requests: int = 4000, arguments: tuple[str, ...] = ()) -> Overhead:
    """Start both servers and send `requests` to each, a round of one after a round of the other.

    The body is one row of the demo model's width. The load generator is the same for both and shares their cores.
    """
    body = json.dumps({"inputs": [float(value % 17) for value in range(64)]}).encode()
    request = post("/predict", body)
    port = free_port()
    echo_command = [sys.executable, "-m", "uvicorn", "loadtests.peers.echo:app", "--port", str(port)]
    echo_command += ["--no-access-log", "--log-level", "warning", "--loop", "uvloop", "--http", "httptools"]
    with (
        ServerProcess(echo_command, port, "/") as echo,
        ServerProcess.service(*arguments) as server,
        Connection("127.0.0.1", echo.port) as to_echo,
        Connection("127.0.0.1", server.port) as to_server,
    ):
        for connection in (to_echo, to_server):
            for _ in range(WARM_UP_REQUESTS):
                connection.time_ns(request)
        echo_ns: list[list[int]] = []
        server_ns: list[list[int]] = []
        for _ in range(ROUNDS):
            echo_ns.append([to_echo.time_ns(request) for _ in range(requests // ROUNDS)])
            server_ns.append([to_server.time_ns(request) for _ in range(requests // ROUNDS)])
        backend = server.get_json("/backend")["default"]
    ratios = [statistics.median(b) / statistics.median(a) for a, b in zip(echo_ns, server_ns, strict=True)]
    return Overhead(
        requests=requests,
        echo_us=statistics.median(itertools.chain.from_iterable(echo_ns)) / 1e3,
        server_us=statistics.median(itertools.chain.from_iterable(server_ns)) / 1e3,
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
        backend=str(backend),
    )
