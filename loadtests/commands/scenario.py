"""`scenario`: a named load with an objective; status 0 if it was met, 1 if it was missed."""

import argparse
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from loadtests import evidence
from loadtests.conditions import conditions, recorded
from loadtests.errors import LoadTestError
from loadtests.evidence import Run
from loadtests.flags import MOST_CONNECTIONS, positive, rate, share, up_to
from loadtests.generator.load import Load
from loadtests.generator.load_profile import PROFILES
from loadtests.generator.shape import ProfileShape
from loadtests.measuring import session
from loadtests.measuring.generator_watch import likely_cause
from loadtests.measuring.measurement import Measurement
from loadtests.measuring.objective import Verdict, table
from loadtests.measuring.overload import SATURATING_USERS, growth, overload, percentile
from loadtests.measuring.scenarios import MIXED_ROWS, SCENARIOS, Scenario
from loadtests.output import require_directory, sole_writer
from loadtests.report.points import load_of, number

DOCUMENT = "scenario.json"
MOST_GOODPUT_SHARE = 1.1  # of the capacity; beyond it that was found too low
FAILED, INTERRUPTED = 1, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("name", choices=list(SCENARIOS), help="; ".join(f"{k}: {v.what}" for k, v in SCENARIOS.items()))
    session.add_arguments(parser, "NAME ")
    parser.set_defaults(backends="fused,compiled,eager", seconds=None)
    parser.epilog = "The default of --seconds: " + ", ".join(f"{k} {v.seconds:g}" for k, v in SCENARIOS.items())
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--users",
        type=up_to(MOST_CONNECTIONS),
        default=16,
        help="users at the peak, each sending without a pause",
    )
    load.add_argument("--rate", type=rate, help="requests a second at the peak, in an open loop instead")
    parser.add_argument("--max-errors", type=share, default=0.0, help="share of requests that may fail")
    parser.add_argument("--min-goodput", type=positive, help="least requests a second answered within --objective-ms")
    parser.add_argument(
        "--max-memory-growth", type=share, default=0.1, help="soak and overload: largest growth of memory, as a share"
    )
    parser.add_argument(
        "--max-p99-ratio", type=positive, default=2.0, help="overload: largest ratio of the p99 to that at capacity"
    )
    parser.add_argument(
        "--min-goodput-share", type=share, default=0.9, help="overload: least goodput, as a share of the capacity"
    )
    parser.add_argument("--max-refusal-ms", type=positive, help="overload: largest p99 of the time to a refusal")
    parser.add_argument("--max-recovery-s", type=positive, default=1.0, help="overload: largest time to recover")


def run(options: argparse.Namespace) -> int:
    """Run one scenario, and print the verdicts on its objectives.

    Raises:
        LoadTestError, OSError: it could not be run.
    """
    require_directory("--out", options.out)
    scenario = SCENARIOS[options.name]
    seconds = options.seconds or scenario.seconds
    runs: list[Run] = []
    document = described(options, seconds)
    fault, verdicts = None, []
    most_times = max(MIXED_ROWS) if scenario.mixes_rows else 1
    connections = options.max_in_flight if options.rate else options.users
    if options.name == "overload":
        connections = max(options.max_in_flight, *SATURATING_USERS)
    with (
        session.session(options, runs.append, connections, most_times) as ready,
        sole_writer("--out", options.out),
    ):
        document |= {"model": ready.target.model, "backends": ready.backends}
        document["conditions"] |= ready.cpus
        kinds = scenario.kinds(list(ready.backends), options.rows)
        load = Load(
            kinds=kinds,
            loop="shape" if options.rate is None else "open",
            label=options.name,
            warm_up_s=options.warm_up_s,
            seconds=seconds,
            seed=(options.seed,),
            users=options.users if options.rate is None else 0,
            rate_per_s=options.rate or 0.0,
            profile=scenario.profile,
            max_in_flight=options.max_in_flight,
        )
        try:
            if options.name == "overload":
                backend = kinds[0][0]
                found = overload(ready.measurement, ready.target, backend, load, seconds)
                document["overload"] = asdict(found)
                verdicts = overload_verdicts(options, found)
            else:
                if load.loop == "shape":
                    shape = ProfileShape(PROFILES[scenario.profile], options.users, seconds, True, options.warm_up_s)
                    ready.generator.environment.shape_class = shape
                verdicts = load_verdicts(options, scenario, ready.measurement, ready.measurement.run(load))
        except (OSError, LoadTestError) as error:
            fault, status = str(error), FAILED
        except KeyboardInterrupt:
            fault, status = "interrupted", INTERRUPTED
        document |= {"runs": [asdict(each) for each in runs], "verdicts": [asdict(each) for each in verdicts]}
        document["ended_early"] = fault
        path: Path = options.out / DOCUMENT
        evidence.write(path, document)
        written = [path, *ready.generator.write_statistics(path)]
    if fault is None and scenario.watches_memory and not has_memory(options):
        print("the server's memory is not watched: --server-pid names its process, where it runs on this host")
    for file in written:
        print(file)
    if fault is not None:
        print(f"error: {fault}; what was measured before is in {path}", file=sys.stderr)
        return status
    print("\n".join(figures(runs, options)))
    print(table(verdicts))
    if "overload" in document and document["overload"]["goodput_share"] > MOST_GOODPUT_SHARE:
        print(
            f"the capacity that was found, {number(document['overload']['capacity_per_s'])} requests/s, was too low: "
            "more was answered under overload; measure when the host is quiet"
        )
    return 0 if all(each.has_passed for each in verdicts) else FAILED


def described(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Return what the document says of a scenario before it is run, and of this host."""
    return {
        "scenario": options.name,
        "conditions": conditions() | {"dtype": options.dtype},
        "rows": options.rows,
        "wire": options.wire,
        "seconds": seconds,
        "warm_up_s": options.warm_up_s,  # before those
        "users": options.users if options.rate is None else None,  # at the peak
        "rate_per_s": options.rate,  # the same of an open loop
        "objective_ms": options.objective_ms,
        "seed": options.seed,
        "command": recorded(sys.argv[1:]),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def figures(runs: list[Run], options: argparse.Namespace) -> list[str]:
    """Return each run's figures, or why it says nothing about the server."""
    told = []
    for run in runs:
        p99 = f"p99 {number(run.latency_ms.p99)} ms" if run.latency_ms else "no reply with 200"
        rates = f"{number(run.answered_per_s)} requests/s answered, {number(run.goodput_per_s)} in time, {p99}"
        told.append(f"{run.backend}, {load_of(run)}: {rates}")
        if run.invalid is not None:
            told.append(f"  says nothing about the server: {run.invalid}")
    cause = likely_cause(runs, options.server_cpus, options.url, options.remote_workers, os.cpu_count() or 1)
    return told if cause is None else [*told, cause]


def load_verdicts(options: argparse.Namespace, scenario: Scenario, measurement: Measurement, run: Run) -> list[Verdict]:
    """Return the verdicts on a run as a whole, and on the p99 of each kind of request if several are mixed."""
    failed = sum(run.errors.values())
    verdicts = [
        Verdict("p99", "ms", run.latency_ms.p99 if run.latency_ms else None, options.objective_ms),
        Verdict("errors", "of requests", failed / run.due if run.due else None, options.max_errors),
        Verdict("generator at its limit", "runs", float(run.invalid is not None), 0.0),
    ]
    if options.min_goodput is not None:
        verdicts.append(Verdict("goodput", "/s", run.goodput_per_s, options.min_goodput, is_floor=True))
    if len(measurement.tallies) > 1:
        for each in measurement.tallies:
            p99 = percentile(each.latencies_ms, 99)
            verdicts.append(Verdict(f"p99 of {each.backend}, {each.rows} rows", "ms", p99, options.objective_ms))
    if scenario.watches_memory and has_memory(options):
        grown = growth(measurement.memory)
        verdicts.append(Verdict("memory growth", "of the start", grown, options.max_memory_growth))
    return verdicts


def overload_verdicts(options: argparse.Namespace, found: Any) -> list[Verdict]:
    """Return the verdicts on an overload."""
    verdicts = [
        Verdict("p99 of what was accepted", "of that at capacity", found.p99_ratio, options.max_p99_ratio),
        Verdict("goodput", "of capacity", found.goodput_share, options.min_goodput_share, is_floor=True),
        Verdict("recovery", "s", found.recovery_s, options.max_recovery_s),
        Verdict("generator at its limit", "runs", float(found.invalid is not None), 0.0),
    ]
    if has_memory(options):
        verdicts.append(Verdict("memory growth", "of the start", found.memory_growth, options.max_memory_growth))
    if options.max_refusal_ms is not None:
        verdicts.append(Verdict("p99 of refusals", "ms", found.refusal_p99_ms, options.max_refusal_ms))
    return verdicts


def has_memory(options: argparse.Namespace) -> bool:
    """Whether the server's memory can be read."""
    return options.url is None or options.server_pid is not None
