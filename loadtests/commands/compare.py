"""`compare`: what each backend holds under load, end to end."""

import argparse
import os
import shlex
import sys
from contextlib import ExitStack
from datetime import UTC, datetime

from loadtests.conditions import conditions, recorded
from loadtests.errors import LoadTestError
from loadtests.evidence import DOCUMENT, Evidence, Run
from loadtests.flags import MOST_CONNECTIONS, MOST_ROUNDS, numbers, rate, up_to
from loadtests.measuring import session
from loadtests.measuring.comparison import Comparison, Plan
from loadtests.measuring.expected import WrongAnswerError
from loadtests.measuring.generator_watch import likely_cause
from loadtests.measuring.refusals import overloaded
from loadtests.output import OutputError, require_directory, sole_writer
from loadtests.report.page import write_report
from loadtests.report.summary import knees_of, least_of
from loadtests.report.terminal import lines

WRONG, ENDED_EARLY, NO_FIGURE, INTERRUPTED = 1, 1, 1, 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.epilog = (
        "Ends with status 0; 1 where a reply was wrong, the server stopped answering, or the search found no rate that "
        "any backend holds; 2 where nothing could be measured; 130 where it was interrupted."
    )
    session.add_arguments(parser)
    parser.add_argument(
        "--users",
        type=numbers(up_to(MOST_CONNECTIONS)),
        default="1,4,16",
        help="numbers of users of the closed loop, comma-separated",
    )
    parser.add_argument(
        "--rates",
        type=lambda text: None if text == "auto" else numbers(rate)(text),
        default="auto",
        help="requests a second of the open loop, comma-separated; auto: shares of each backend's knee, and beyond "
        "it, each for up to 4 times --seconds where it has fewer than 200 requests in them",
    )
    parser.add_argument(
        "--knee", action=argparse.BooleanOptionalAction, default=True, help="find the rate that holds (default: --knee)"
    )
    parser.add_argument("--rounds", type=up_to(MOST_ROUNDS), default=3, help="how often each load is measured")


def run(options: argparse.Namespace) -> int:
    """Compare, write all that was measured and its report, and say what the backends hold.

    Raises:
        LoadTestError, OSError: nothing could be measured.
    """
    require_directory("--out", options.out)
    path = options.out / DOCUMENT
    evidence: Evidence | None = None

    def keep(measured: Run) -> None:
        if evidence is not None:
            evidence.runs.append(measured)
            evidence.write(path)

    surroundings = conditions() | {"dtype": options.dtype}  # before this process leaves cores to the server
    status = 0
    with ExitStack() as writing:
        with session.session(options, keep, max(*options.users, options.max_in_flight)) as ready:
            writing.enter_context(sole_writer("--out", options.out))
            evidence = Evidence(
                conditions=surroundings | {"processes": ready.generator.count} | ready.cpus,
                model=ready.target.model,
                backends=ready.backends,
                rows=options.rows,
                wire=options.wire,
                objective_ms=options.objective_ms,
                seed=options.seed,
                command=recorded(sys.argv[1:]),
                started=datetime.now(UTC).isoformat(timespec="seconds"),
            )
            plan = Plan(
                rows=options.rows,
                users=options.users,
                rates_per_s=options.rates,
                has_knee=options.knee,
                rounds=options.rounds,
                seconds=options.seconds,
                warm_up_s=options.warm_up_s,
                max_in_flight=options.max_in_flight,
            )
            print(f"this takes {plan.least_s(len(ready.backends)) / 60:.1f} minutes at the least", file=sys.stderr)
            try:
                Comparison(ready.measurement, evidence, plan).run()
            except WrongAnswerError as error:
                evidence.ended_early, status = str(error), WRONG
            except (OSError, LoadTestError) as error:
                evidence.ended_early, status = str(error), ENDED_EARLY
            except KeyboardInterrupt:
                evidence.ended_early, status = "interrupted", INTERRUPTED
            evidence.write(path)
            written = [path, *ready.generator.write_statistics(path)]
        try:
            written += write_report(evidence, options.out)
        except OSError as error:
            raise OutputError(f"{options.out}: {error}; what was measured is in {path}") from error
        except KeyboardInterrupt:
            again = f"python -m loadtests report {shlex.quote(str(options.out))}"
            print(f"error: interrupted; what was measured is in {path}, and `{again}` tells it", file=sys.stderr)
            return INTERRUPTED
    print("\n".join(lines(evidence)))
    invalid = sum(each.invalid is not None for each in evidence.runs)
    if invalid:
        print(f"{invalid} of {len(evidence.runs)} runs say nothing about the server; their field `invalid` says why")
    cores = os.cpu_count() or 1
    cause = likely_cause(evidence.runs, options.server_cpus, options.url, options.remote_workers, cores)
    for advice in (cause, overloaded(evidence.runs, options.rows, ready.most_rows, options.url)):
        if advice is not None:
            print(advice)
    print()
    for file in written:
        print(file)
    if evidence.ended_early is not None:
        print(f"error: {evidence.ended_early}; what was measured before is in {path}", file=sys.stderr)
    elif options.knee and not (knees_of(evidence) or least_of(evidence)):
        print("error: no backend has a rate that holds; --no-knee does without the search", file=sys.stderr)
        status = NO_FIGURE
    return status
