"""Nothing is compiled once the server is ready, and nothing twice."""

import functools
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.service.running_server import RunningServer, Start

pytestmark = pytest.mark.slow  # real servers


def written(cache: Path, *endings: str) -> dict[str, int]:
    """When each file in a cache was last written; the files of these endings, or all."""
    files = [path for path in cache.rglob("*") if path.is_file() and (not endings or path.suffix in endings)]
    return {str(path): path.stat().st_mtime_ns for path in files}


@pytest.fixture(scope="module")
def compiling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of the demo model that has a cache of its own, which was empty when it started."""
    place = tmp_path_factory.mktemp("compiling")
    server = RunningServer(place / "log", "--cache-dir", str(place / "cache")).wait_ready()
    yield server
    assert server.stop() == 0
    server.end()


@pytest.fixture
def cache(compiling: RunningServer) -> Path:
    return compiling.log.parent / "cache"


def test_nothing_has_been_compiled_since_the_server_was_ready(compiling: RunningServer, cache: Path) -> None:
    ask_for_random_batches(compiling)
    assert written(cache)
    assert {name: time_ns for name, time_ns in written(cache).items() if time_ns > compiling.ready_ns} == {}


def test_another_start_compiles_nothing_anew(start: Start, cache: Path) -> None:
    before = written(cache, ".cpp", ".so")
    assert before
    again = start("--backends", "compiled", "--cache-dir", str(cache)).wait_ready()
    assert written(cache, ".cpp", ".so") == before
    assert again.stop() == 0


def ask_for_random_batches(server: RunningServer) -> None:
    """Send the first request of each backend, then many sizes in no order, alone and together."""
    draw = random.Random(0)
    sizes = [1, *draw.sample(range(1, 65), 24), 2, 33]
    for backend in ("eager", "compiled", "fused"):

        def call(rows: int, backend: str = backend) -> httpx.Response:
            body = {"inputs": [[0.5] * 64] * rows}
            return httpx.post(f"{server.url}/predict/{backend}", json=body, timeout=60)

        for rows in sizes:
            reply = call(rows)
            assert (reply.status_code, reply.json()["backend"]) == (200, backend)
        together = [draw.randint(1, 12) for _ in range(5)]
        replies = server.answers_together([functools.partial(call, rows) for rows in together])
        assert {int(reply.headers["x-batch-rows"]) for reply in replies} == {sum(together)}
