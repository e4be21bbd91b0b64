"""A server started for a measurement, and ended after it."""

import contextlib
import http.client
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from loadtests.affinity import confining
from loadtests.errors import LoadTestError
from loadtests.orphan_guard import guarded

ROOT = Path(__file__).parents[1]
START_LIMIT_S = 300.0
STOP_LIMIT_S = 30.0
CHOSEN = {
    "--host": "the server is started on the loopback interface",
    "--port": "a free port is taken",
    "--model": "the model is the first argument",
    "--backends": "give it before the `--`",
    "--dtype": "give it before the `--`",
    "--api-key": "give --key before the `--`, or set MLP_API_KEY",
}
"""Flags of the server that a measurement sets itself, and what to do instead."""
ENVIRONMENT = ("HOST", "PORT", "MODEL", "BACKENDS", "DTYPE", "API_KEY", "DEFAULT_BACKEND", "CANARY")
"""Settings that a server does not take from the environment when it is started to be measured: those that are chosen,
and those of requests that name no backend, which may contradict them."""


def ignored(_port: int) -> None:
    """Do nothing when a server answers."""


class ServerStartError(LoadTestError):
    """The server ended, or did not answer in time."""


class ServerFlagError(LoadTestError):
    """A flag for the server that the measurement sets itself."""


def require_free_flags(flags: list[str]) -> None:
    """Refuse flags for the server that would override what the measurement chooses.

    Raises:
        ServerFlagError: one does; the server takes the beginning of a name as well.
    """
    for each in flags:
        name = each.partition("=")[0]
        for chosen, instead in CHOSEN.items():
            if len(name) > len("--") and chosen.startswith(name):
                raise ServerFlagError(f"-- {name}: expected no {chosen} for the server behind `--`: {instead}")


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port of the loopback interface that nobody listens on, and that the system gives to nobody else meanwhile.

    A server can listen on it if it sets SO_REUSEADDR or SO_REUSEPORT, as all that are measured do (socket(7)).
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


class ServerProcess:
    """A child process that serves HTTP on a loopback port; a context manager that waits for it and ends it."""

    def __init__(
        self,
        command: Callable[[int], list[str]],
        ready_path: str,
        environment: dict[str, str] | None = None,
        cpus: frozenset[int] | None = None,
        on_answer: Callable[[int], None] = ignored,
    ) -> None:
        """`command` makes the command line for a port, `ready_path` answers below 400 once the server is ready.

        None: this process's environment and cores.

        `on_answer` is called with the port once the server answers but is not ready yet; if it raises, the server is
        ended.
        """
        self.port = 0  # as `pid`, once it is started
        self.pid: int | None = None
        self._command = command
        self._ready_path = ready_path
        self._environment = environment
        self._cpus = cpus
        self._on_answer = on_answer
        self._process: subprocess.Popen[bytes] | None = None
        self._held = contextlib.ExitStack()

    @classmethod
    def service(
        cls,
        *arguments: str,
        key: str = "",
        cpus: frozenset[int] | None = None,
        on_answer: Callable[[int], None] = ignored,
    ) -> Self:
        """Return this project's server with command-line flags; if there is a key, the server asks for it.

        It may use only these cores; None: those of this process. At `on_answer` it can tell everything but what its
        workers do.
        """

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "service", "--port", str(port), *arguments]

        chosen = {f"MLP_{name}" for name in ENVIRONMENT}
        environment = {name: value for name, value in os.environ.items() if name.upper() not in chosen}
        environment |= {"MLP_API_KEY": key} if key else {}
        return cls(command, "/v2/health/ready", environment, cpus, on_answer)

    def __enter__(self) -> Self:
        """Start the server and wait until it is ready.

        Raises:
            ServerStartError: it ended, or took too long.
            Exception: what `on_answer` raises.
        """
        # In a process group of its own, so that Ctrl-C ends the measurement before it ends what is measured.
        self.port = self._held.enter_context(free_port())
        command = self._command(self.port)
        try:
            self._process = subprocess.Popen(
                guarded(confining(self._cpus, command)),
                cwd=ROOT,
                env=self._environment,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
            self.pid = self._process.pid
            self._wait(shlex.join(command))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the server."""
        self._held.close()
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def get_json(self, path: str) -> Any:
        """Return the JSON that a path answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())

    def _wait(self, told: str) -> None:
        assert self._process is not None  # noqa: S101  entered
        limit = time.monotonic() + START_LIMIT_S
        has_answered = False
        while (status := self._status()) is None or status >= 400:
            if status is not None and not has_answered:
                has_answered = True
                self._on_answer(self.port)
            if self._process.poll() is not None:
                raise ServerStartError(f"{told}: ended with {self._process.returncode} before it was ready")
            if time.monotonic() > limit:
                raise ServerStartError(f"{told}: not ready after {START_LIMIT_S:g} s")
            time.sleep(0.05)

    def _status(self) -> int | None:
        """Return what the path answers with; None where nothing does."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", self._ready_path)
            return connection.getresponse().status
        return None
