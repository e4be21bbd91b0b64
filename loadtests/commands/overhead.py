"""`overhead`: one request at a time against a bare ASGI echo of the same bytes."""

import argparse
import json
from dataclasses import asdict
from functools import partial
from pathlib import Path

from loadtests.conditions import conditions
from loadtests.errors import LoadTestError
from loadtests.flags import whole
from loadtests.overhead import measure

FEWEST_REQUESTS = 100  # a median of each of the rounds takes a few


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--requests", type=partial(whole, least=FEWEST_REQUESTS), default=4000, help="requests to each server"
    )
    parser.add_argument("--json", type=Path, help="file to write the result to")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the file that was asked for.

    Raises:
        LoadTestError, OSError: it could not be measured or written.
    """
    if options.json and not options.json.parent.is_dir():
        raise LoadTestError(f"--json {options.json}: there is no directory {options.json.parent}")
    results = measure(options.requests)
    if options.json:
        document = {"overhead": [asdict(result) for result in results], "conditions": conditions()}
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    for each in results:
        print(f"{each.client}: bare echo {each.echo_us:.0f} us, {each.backend} {each.server_us:.0f} us, medians")
        print(f"  ratio {each.ratio:.2f}, median of rounds; {each.ratio_min:.2f} to {each.ratio_max:.2f}")
    return 0
