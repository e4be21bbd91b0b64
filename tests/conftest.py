"""Fixtures for the whole suite: Triton's interpreter where there is no GPU, and real servers on free ports."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from hypothesis import settings

from tests.made_model import write_made_model
from tests.service.running_server import RunningServer, Start

if TYPE_CHECKING:
    from tests.browser import Browser  # which loads selenium

# Before any kernel is imported: without a GPU, Triton kernels run under its interpreter.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

for name in ("ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # what `make test` hands on to a make that a test calls
    os.environ.pop(name, None)

for number in (signal.SIGINT, signal.SIGHUP):  # which a shell's `&`, and `nohup`, have what they start ignore
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

settings.register_profile("suite", deadline=None)  # a busy host is no fault
settings.load_profile("suite")


def pytest_configure() -> None:
    """Leave the other cores to the files that run beside: threads of two processes wait for each other on one core."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever starts a whole server is slow."""
    for item in items:
        if {"server", "start", "lend", "browser"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@contextlib.contextmanager
def starter(directory: Path) -> Iterator[Start]:
    """Start servers that end with it."""
    servers: list[RunningServer] = []

    def start(*arguments: str, **environment: str) -> RunningServer:
        server = RunningServer(directory / f"server-{len(servers)}.log", *arguments, **environment)
        servers.append(server)
        return server

    try:
        yield start
    finally:
        for server in servers:
            server.end()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start servers that end with the test."""
    with starter(tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def lend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Servers of the tiny model on eager, one for each choice of flags, shared by the tests of a module.

    A test leaves the one that it is lent as it was, but for its counters.
    """
    directory = tmp_path_factory.mktemp("lent")
    model = write_made_model(directory, "tiny", dim=8, hidden=16, depth=1)
    servers: dict[object, RunningServer] = {}
    with starter(directory) as start:

        def lend(*arguments: str, **environment: str) -> RunningServer:
            chosen = (arguments, tuple(environment.items()))
            if chosen not in servers:
                flags = ("--model", str(model), "--backends", "eager")
                servers[chosen] = start(*flags, *arguments, **environment).wait_ready()
            server = servers[chosen]
            server.wait_until(lambda: server.metric("mlp_queue_rows") == 0)  # what the test before has left
            return server

        yield lend
        for each in servers.values():
            assert each.stop() == 0


@pytest.fixture(scope="session")
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What servers of the demo model need compile only once, whichever process of the suite starts them."""
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "compiled-code"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, compiled_code: Path) -> Iterator[RunningServer]:
    """The demo model on all three backends, shared by every test that leaves it as it was."""
    directory = tmp_path_factory.mktemp("server")
    with starter(directory) as start:
        yield start("--cache-dir", str(compiled_code)).wait_ready()


@pytest.fixture(scope="session")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def browser() -> Iterator["Browser"]:
    """One browser, shared by every test of a page."""
    from tests.browser import browsers

    yield from browsers()


@pytest.fixture
def small_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """A roof that is measured in no time."""
    from kernels import roof

    monkeypatch.setitem(roof.COPY_BYTES, "cpu", 2**12)
    monkeypatch.setitem(roof.PRODUCT_SIDES, "cpu", (16,))


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    """A model directory with seeded weights that starts in no time."""
    return write_made_model(tmp_path, "tiny", dim=8, hidden=16, depth=1)
