"""Whether a run says something about the server, or only about the generator."""

from collections.abc import Iterable

import numpy as np

from loadtests.evidence import Run
from loadtests.generator.tally import Tally

CPU_LIMIT = 0.8  # of a core: beyond it a process sends late and reads late
LITTLE_CPU = 0.5  # of a core: a process that sends late and uses less was kept from running
LATE_SHARE = 0.2  # of the objective; latency counts from when a request was due, so that this errs against the server
LATE_FLOOR_MS = 1.0


def late_p99_ms(tally: Tally) -> float | None:
    """Return how late requests left, or were given up, of an open loop."""
    return float(np.percentile(tally.lates_ms, 99)) if tally.lates_ms else None


def fault_of(tally: Tally, objective_ms: float) -> str | None:
    """Return why a run says nothing about the server, in a sentence; None where it does."""
    if tally.generator_cpu > CPU_LIMIT:
        return (
            f"the generator used {tally.generator_cpu:.0%} of a core, more than {CPU_LIMIT:.0%}; "
            "give it more --processes or another host"
        )
    late_ms, limit_ms = late_p99_ms(tally), max(LATE_FLOOR_MS, LATE_SHARE * objective_ms)
    if late_ms is not None and late_ms > limit_ms:
        return f"1% of the requests left more than {late_ms:.1f} ms late, and {limit_ms:g} ms is allowed"
    return None


def likely_cause(runs: Iterable[Run]) -> str | None:
    """Return, in a sentence, why the generator was late although it used little CPU; None where that did not happen."""
    shares = [run.generator_cpu for run in runs if run.invalid and run.late_p99_ms and run.generator_cpu < LITTLE_CPU]
    if not shares:
        return None
    return (
        f"requests left late while the generator used no more than {max(shares):.0%} of a core: the server probably "
        "shares its cores; start the server with fewer threads (`-- --threads 1`), or load it from another host"
    )
