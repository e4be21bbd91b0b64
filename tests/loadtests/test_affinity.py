import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loadtests.affinity import TASKS, AffinityError, Division, confined, listed
from loadtests.flags import cpus

ROOT = Path(__file__).parents[2]
USABLE = frozenset(os.sched_getaffinity(0))
FIRST = min(USABLE)
needs_two_cores = pytest.mark.skipif(len(USABLE) < 2, reason="this process may use one core alone")


def confinement() -> set[frozenset[int]]:
    """The cores of every thread of this process."""
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in TASKS.iterdir()}


@pytest.mark.parametrize("text", ["0", "0-1", "0,2-3", "1,3,5-7", "65535"])
def test_cores_are_written_as_they_are_read(text: str) -> None:
    assert listed(cpus(text)) == text


@needs_two_cores
def test_the_load_gets_every_core_that_the_server_does_not() -> None:
    division = Division.of(frozenset({FIRST}))
    assert division == Division(frozenset({FIRST}), USABLE - {FIRST})
    assert division.conditions == {"server_cpus": str(FIRST), "generator_cpus": listed(USABLE - {FIRST})}


@needs_two_cores
def test_every_thread_is_confined_with_what_is_started_and_gets_its_cores_back() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        with confined(frozenset({FIRST})):
            assert confinement() == {frozenset({FIRST})}
            code = "import os; print(os.sched_getaffinity(0))"
            child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            assert child.stdout == f"{ {FIRST} }\n"
        assert confinement() == {USABLE}
    finally:
        ended.set()
        thread.join()


def test_without_cores_nothing_is_confined() -> None:
    with confined(None):
        assert os.sched_getaffinity(0) == USABLE


@needs_two_cores
def test_a_core_that_this_process_may_not_use_is_refused() -> None:
    other = max(USABLE)
    message = rf"^--server-cpus {other}: expected cores that this process may use, {FIRST}: it may not use {other}$"
    with confined(frozenset({FIRST})), pytest.raises(AffinityError, match=message):
        Division.of(frozenset({other}))


def test_a_core_that_is_not_there_is_refused() -> None:
    with pytest.raises(AffinityError, match=rf"may use, {listed(USABLE)}: this host has no core 65534-65535$"):
        Division.of(frozenset({FIRST, 65534, 65535}))


def test_a_server_that_leaves_no_core_to_its_load_is_refused() -> None:
    with pytest.raises(AffinityError, match="expected a core to be left to the load, got all that this process may"):
        Division.of(USABLE)


def test_a_system_that_confines_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(AffinityError, match=f"^--server-cpus 0: expected a system that confines .* got {sys.platform}"):
        Division.of(frozenset({0}))
