"""Whether a run says something about the server, or only about the generator."""

import statistics
from collections.abc import Iterable

import numpy as np

from loadtests.evidence import Run
from loadtests.generator.tally import Tally

CPU_LIMIT = 0.8  # of a core: beyond it a process sends late and reads late
LITTLE_CPU = 0.5  # of a core: a process that sends late and uses less was kept from running
LATE_SHARE = 0.2  # of the objective; latency counts from when a request was due, so that this errs against the server
LATE_FLOOR_MS = 1.0
BUSY_SHARE = 0.15  # of the host's cores, in use by others: a core of two is then often not there when it is wanted
ELSEWHERE = "make the load on another host (`python -m loadtests worker`)"


def late_p99_ms(tally: Tally) -> float | None:
    """Return, for an open loop, the p99 of how late requests left or were given up."""
    return float(np.percentile(tally.lates_ms, 99)) if tally.lates_ms else None


def fault_of(tally: Tally, objective_ms: float) -> str | None:
    """Return, in a sentence, why a run says nothing about the server; None if it does say something."""
    if tally.generator_cpu > CPU_LIMIT:
        return (
            f"the generator used {tally.generator_cpu:.0%} of a core, more than {CPU_LIMIT:.0%}; "
            "give it more --processes or another host"
        )
    late_ms, limit_ms = late_p99_ms(tally), max(LATE_FLOOR_MS, LATE_SHARE * objective_ms)
    if late_ms is not None and late_ms > limit_ms:
        return f"1% of the requests left more than {late_ms:.1f} ms late, and {limit_ms:g} ms is allowed"
    return None


def likely_cause(
    runs: Iterable[Run], server_cpus: frozenset[int] | None, url: str | None, remote_workers: int, cores: int
) -> str | None:
    """Return, in sentences, why the generator was late although it used little CPU; None if that did not happen.

    What helps depends on the flags: the cores of a server that was started, if it does not share all, or the `url` of
    one that was running, which workers on other hosts may already be loading.
    """
    elsewhere = "make the load with more workers on other hosts" if remote_workers else ELSEWHERE
    late = [run for run in runs if run.invalid and run.late_p99_ms and run.generator_cpu < LITTLE_CPU]
    if not late:
        return None
    most = max(run.generator_cpu for run in late)
    what = f"requests left late while the generator used no more than {most:.0%} of a core"
    others = [run.other_cpu for run in late if run.other_cpu is not None]
    if others and statistics.median(others) > BUSY_SHARE * cores:
        share = statistics.median(others) / cores
        return (
            f"{what}: this host is busy with something else, {share:.0%} of its {cores} cores were used by neither "
            f"server nor generator; measure when it is quiet, or {elsewhere}"
        )
    if url is not None and not others:
        return (
            f"{what}: the server or other programs probably share its cores, and only with --server-pid is it known "
            f"which; measure when this host is quiet, start a server of several --threads with fewer, or {elsewhere}"
        )
    if url is not None:
        return (
            f"{what}: the server probably shares its cores; start one of several --threads with fewer, or {elsewhere}"
        )
    if server_cpus is not None:
        return f"{what}, on cores without the server: give the load more cores or fewer --processes, or {elsewhere}"
    if cores == 1:
        return f"{what}: the server shares its only core; {elsewhere}"
    return f"{what}: the server probably shares its cores; give it cores of its own (--server-cpus), or {elsewhere}"


def busy_warning(used: float, cores: int) -> str | None:
    """Return a sentence on the cores that are in use before a measurement; None where they are few."""
    if used <= BUSY_SHARE * cores:
        return None
    return f"this host is busy: other processes use {used:.0%} of {cores:.0%}; expect runs that do not count"
