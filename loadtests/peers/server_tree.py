"""A peer server with every process that it starts: they are started, watched, measured, and all ended.

Some servers leave children in sessions of their own behind. So this process becomes the reaper of orphans below it
(`PR_SET_CHILD_SUBREAPER` of prctl(2)) while a server runs: a process that loses its parent becomes a child of this one,
and every new child belongs to the server. The server's first process is told to end if this one is killed.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import psutil

from loadtests.conditions import ROOT
from loadtests.errors import LoadTestError
from loadtests.orphan_guard import guarded

PR_SET_CHILD_SUBREAPER = 36
STOP_LIMIT_S = 15.0  # from SIGTERM to the end of the server's first process
ORPHAN_LIMIT_S = 3.0  # from there to the end of the others
KILL_LIMIT_S = 10.0


class ServerTreeError(LoadTestError):
    """The server ended, did not answer in time, or cannot be ended."""


class ServerTree:
    """A program that serves HTTP on a loopback port, and its descendants; a context manager that ends them all."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        """Nothing is started yet; `log` takes what the server writes."""
        self._command = command
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._others: set[int] = set()

    def __enter__(self) -> Self:
        """Start the program in a session of its own."""
        self._others = {child.pid for child in psutil.Process().children()}
        reap_orphans(True)
        try:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    guarded(self._command),
                    cwd=ROOT,
                    env=os.environ | self._environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            reap_orphans(False)
            raise ServerTreeError(f"it cannot be started: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        """End every process: SIGTERM to the first, SIGKILL to what is left.

        Raises:
            ServerTreeError: some process is still there after SIGKILL.
        """
        if self._process is None:
            return
        try:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_LIMIT_S)
            if not self._ended_within(ORPHAN_LIMIT_S):
                for each in self.processes():
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                if not self._ended_within(KILL_LIMIT_S):
                    left = ", ".join(str(each.pid) for each in self.processes())
                    raise ServerTreeError(f"processes {left} are still there {KILL_LIMIT_S:g} s after SIGKILL")
        finally:
            reap_orphans(False)

    def wait(self, answers: Callable[[], bool], limit_s: float) -> float:
        """Wait until the server answers, and return how many seconds that took from now.

        Raises:
            ServerTreeError: it ended, or took too long; with the last line that it wrote.
        """
        assert self._process is not None  # noqa: S101  entered
        start = time.monotonic()
        while not answers():
            if self._process.poll() is not None:
                raise ServerTreeError(
                    f"it ended with status {self._process.returncode} before it answered{self._last()}"
                )
            if time.monotonic() - start > limit_s:
                raise ServerTreeError(f"it did not answer within {limit_s:g} s{self._last()}")
            time.sleep(0.02)
        return time.monotonic() - start

    def processes(self) -> list[psutil.Process]:
        """Return every process of the server that lives."""
        found: dict[int, psutil.Process] = {}
        for child in psutil.Process().children():
            if child.pid not in self._others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    found |= {each.pid: each for each in (child, *child.children(recursive=True))}
        return [each for each in found.values() if is_alive(each)]

    def memory_bytes(self) -> int:
        """Return the proportional set size of all processes together: pages that several share are counted once."""
        total = 0
        for each in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += each.memory_full_info().pss
        return total

    def _ended_within(self, limit_s: float) -> bool:
        limit = time.monotonic() + limit_s
        while self._is_any_left():
            if time.monotonic() > limit:
                return False
            time.sleep(0.02)
        return True

    def _is_any_left(self) -> bool:
        """Reap what has ended, which may bring its own children here; return whether there is a child yet."""
        assert self._process is not None  # noqa: S101  entered
        self._process.poll()
        children = [child.pid for child in psutil.Process().children() if child.pid not in self._others]
        for pid in children:
            if pid != self._process.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
        return bool(children)

    def _last(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return f"; its last words: {lines[-1][-200:]}" if lines else ""


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs; one that only waits to be reaped does not."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def reap_orphans(wanted: bool) -> None:
    """Make this process the new parent of orphans below it, or no longer."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
