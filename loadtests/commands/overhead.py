"""`overhead`: one request at a time against a bare ASGI echo of the same bytes."""

import argparse
from dataclasses import asdict
from functools import partial

from loadtests import evidence
from loadtests.conditions import conditions
from loadtests.flags import path, whole
from loadtests.measuring.overhead import measure
from loadtests.output import require_file

FEWEST_REQUESTS = 100  # a median of each of the rounds takes a few
MOST_REQUESTS = 10_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--requests",
        type=partial(whole, least=FEWEST_REQUESTS, most=MOST_REQUESTS),
        default=4000,
        help="requests to each server",
    )
    parser.add_argument("--json", type=path, help="file to write the result to")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the file that was asked for.

    Raises:
        LoadTestError, OSError: it could not be measured or written.
    """
    if options.json:
        require_file("--json", options.json)
    results = measure(options.requests)
    for each in results:
        print(f"{each.client}: bare echo {each.echo_us:.0f} us, {each.backend} {each.server_us:.0f} us, medians")
        print(f"  ratio {each.ratio:.2f}, median of rounds; {each.ratio_min:.2f} to {each.ratio_max:.2f}")
    if options.json:
        document = {"overhead": [asdict(result) for result in results], "conditions": conditions()}
        evidence.write(options.json, document)
    return 0
