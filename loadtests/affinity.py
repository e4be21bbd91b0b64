"""Divides the cores between a server that is started and its load generator: `--server-cpus`.

`python -m loadtests.affinity CPUS COMMAND...` becomes a command that may use only these cores, as may all that it
starts. The command is confined before it imports anything, and counts those cores as the ones it has.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from loadtests.errors import LoadTestError
from loadtests.flags import cpus

TASKS = Path("/proc/self/task")  # a directory for each thread. Source: proc_pid_task(5)


def add_argument(parser: argparse.ArgumentParser) -> None:
    """Add the flag that divides the cores of this host."""
    parser.add_argument(
        "--server-cpus",
        type=cpus,
        metavar="LIST",
        help="cores for the server that is started, such as 0,2-3; the load gets the others (default: both use all)",
    )


class AffinityError(LoadTestError):
    """Cores that the server cannot have, or that would leave none to the load generator."""


@dataclass(frozen=True, slots=True)
class Division:
    """The cores that this process may use, divided between a server and its load."""

    server: frozenset[int]
    generator: frozenset[int]

    @classmethod
    def of(cls, server: frozenset[int]) -> Self:
        """Give a server some cores, and its load the others.

        Raises:
            AffinityError: there are no such cores, or they are not this process's, or they are all that it has.
        """
        flag = f"--server-cpus {listed(server)}"
        if not hasattr(os, "sched_setaffinity"):
            raise AffinityError(
                f"{flag}: expected a system that confines processes to cores, as Linux does, got {sys.platform}; "
                "make the load on another host instead"
            )
        usable = frozenset(os.sched_getaffinity(0))
        if others := server - usable:
            missing = {each for each in others if each >= (os.cpu_count() or 1)}
            why = f"this host has no core {listed(missing)}" if missing else f"it may not use {listed(others)}"
            raise AffinityError(f"{flag}: expected cores that this process may use, {listed(usable)}: {why}")
        if server == usable:
            raise AffinityError(f"{flag}: expected a core to be left to the load, got all that this process may use")
        return cls(server, usable - server)

    @property
    def conditions(self) -> dict[str, str]:
        """The division as a document keeps it."""
        return {"server_cpus": listed(self.server), "generator_cpus": listed(self.generator)}


def listed(cores: Iterable[int]) -> str:
    """Return cores as a list such as `0,2-3`."""
    ordered = sorted(cores)
    starts = [each for before, each in pairwise([-2, *ordered]) if each != before + 1]
    ends = [each for each, after in pairwise([*ordered, ordered[-1] + 2]) if after != each + 1]
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in zip(starts, ends, strict=True))


def confining(cores: frozenset[int] | None, command: list[str]) -> list[str]:
    """Return the command that becomes another one on these cores alone; None: on all."""
    return command if cores is None else [sys.executable, "-m", "loadtests.affinity", listed(cores), *command]


@contextmanager
def confined(cores: frozenset[int] | None) -> Iterator[None]:
    """Confine this process, and all that it starts meanwhile, to cores, then restore its own; None: do nothing."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    move_threads(cores)
    try:
        yield
    finally:
        move_threads(before)


def move_threads(cores: Iterable[int]) -> None:
    """Move every thread of this process: libraries have started some, and each has cores of its own."""
    moved: set[str] = set()
    while left := {each.name for each in TASKS.iterdir()} - moved:  # those that one started before it was moved
        for each in left:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(each), cores)
        moved |= left


def main(cores: frozenset[int], command: list[str]) -> None:
    """Replace this process by the command, on these cores.

    Raises:
        OSError: there is no such command, or no such core.
    """
    os.sched_setaffinity(0, cores)
    os.execvp(command[0], command)  # noqa: S606  as it is, with no shell


if __name__ == "__main__":
    main(cpus(sys.argv[1]), sys.argv[2:])
