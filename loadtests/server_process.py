"""A server started for a measurement, and ended after it."""

import contextlib
import http.client
import json
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from loadtests.errors import LoadTestError

ROOT = Path(__file__).parents[1]
START_LIMIT_S = 300.0
STOP_LIMIT_S = 30.0


class ServerStartError(LoadTestError):
    """The server ended, or did not answer in time."""


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """A child process that serves HTTP on a loopback port; a context manager that waits for it and ends it."""

    def __init__(self, command: list[str], port: int, ready_path: str) -> None:
        """`ready_path` answers below 400 once the server is ready."""
        self.port = port
        self.pid: int | None = None  # once it is started
        self._command = command
        self._ready_path = ready_path
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def service(cls, *arguments: str) -> Self:
        """Return this project's server, with command-line flags."""
        port = free_port()
        return cls([sys.executable, "-m", "service", "--port", str(port), *arguments], port, "/v2/health/ready")

    def __enter__(self) -> Self:
        """Start the server and wait until it is ready.

        Raises:
            ServerStartError: it ended, or took too long.
        """
        # In a process group of its own, so that Ctrl-C ends the measurement before it ends what is measured.
        self._process = subprocess.Popen(self._command, cwd=ROOT, stdout=subprocess.DEVNULL, process_group=0)
        self.pid = self._process.pid
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End the server."""
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

    def _wait(self) -> None:
        assert self._process is not None  # noqa: S101  entered
        limit, told = time.monotonic() + START_LIMIT_S, shlex.join(self._command)
        while not self._is_ready():
            if self._process.poll() is not None:
                raise ServerStartError(f"{told}: ended with {self._process.returncode} before it was ready")
            if time.monotonic() > limit:
                raise ServerStartError(f"{told}: not ready after {START_LIMIT_S:g} s")
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", self._ready_path)
            return connection.getresponse().status < 400
        return False
