"""Whether a run says something about the server, or only about the generator."""

import numpy as np

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
        late = f"1% of the requests left more than {late_ms:.1f} ms late, and {limit_ms:g} ms is allowed"
        if tally.generator_cpu < LITTLE_CPU:
            late += (
                f"; the generator used {tally.generator_cpu:.0%} of a core, so that the server probably shares its "
                "cores: start the server with fewer threads (`-- --threads 1`), or load it from another host"
            )
        return late
    return None
