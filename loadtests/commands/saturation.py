"""`saturation`: the rows a second that the server gets out of a model, over those of the model alone."""

import argparse
import sys
from dataclasses import asdict

from tqdm import tqdm

from loadtests import affinity, evidence
from loadtests.affinity import Division
from loadtests.conditions import conditions, recorded
from loadtests.flags import DAY_S, MOST_CONNECTIONS, MOST_ROUNDS, MOST_ROWS, path, up_to
from loadtests.measuring.saturation import WIRE, Saturation, SaturationPlan, measure, ways
from loadtests.output import require_file
from loadtests.peers import wrk
from loadtests.peers.servers import threads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("model", nargs="?", default="geglu-768", help="a directory, or a name under models/zoo")
    parser.add_argument("--rows", type=up_to(MOST_ROWS), default=16, help="rows in each request")
    parser.add_argument(
        "--connections", type=up_to(MOST_CONNECTIONS), default=32, help="connections of the closed loop"
    )
    parser.add_argument("--rounds", type=up_to(MOST_ROUNDS), default=3, help="how often each way is started and loaded")
    parser.add_argument(
        "--seconds", type=up_to(DAY_S), default=10, help="seconds of each load, after a second of warm-up"
    )
    affinity.add_argument(parser)
    parser.add_argument("--json", type=path, required=True, help="file to write the result to")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the file; return 130 after Ctrl-C, with what was measured before.

    Raises:
        LoadTestError, OSError: nothing could be measured or written.
    """
    plan = SaturationPlan(options.model, options.rows, options.connections, options.rounds, options.seconds)
    division = None if options.server_cpus is None else Division.of(options.server_cpus)
    require_file("--json", options.json)
    load = f"closed loop, wrk on {'cores of its own' if division else 'the cores of the server'}"
    surroundings = conditions() | {"wrk": wrk.version(), "wire": WIRE, "load": load}
    surroundings |= division.conditions if division else {}
    command = recorded(sys.argv[1:])
    found = ways(len(division.server) if division else threads())

    def write(ended_early: str | None) -> None:
        document = {"plan": asdict(plan), "saturation": [each.document() for each in found]}
        evidence.write(
            options.json, document | {"conditions": surroundings, "command": command, "ended_early": ended_early}
        )

    status = 0
    try:
        with tqdm(total=plan.rounds * len(found), desc="saturation", unit="load") as bar:
            for _ in measure(plan, found, division):
                write("not all rounds are there")
                bar.update()
    except KeyboardInterrupt:
        status = 130
    write("interrupted" if status else None)
    for each in found:
        print(line(each))
    return status


def line(each: Saturation) -> str:
    """Return one way's result for a terminal."""
    told = each.document()
    if told["ratio"] is None:
        return f"{' '.join(each.flags)}: not measured"
    served, alone, ratio = told["served_rows_per_s"]["median"], told["model_rows_per_s"]["median"], told["ratio"]
    return (
        f"{' '.join(each.flags)}: {served:.0f} of {alone:.0f} rows/s in batches of {told['batch_rows']['median']:.0f}, "
        f"ratio {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})"
    )
