"""`python -m loadtests`: measurements of a running server, over HTTP alone."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from loadtests.conditions import conditions
from loadtests.connection import UnexpectedReplyError
from loadtests.overhead import measure
from loadtests.server_process import ServerStartError


def main(arguments: list[str]) -> int:
    """Run one measurement; return 0, or 2 with a line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m loadtests", description=__doc__)
    commands = parser.add_subparsers(required=True, dest="command")
    overhead = commands.add_parser("overhead", help="one request at a time against a bare ASGI echo of the same bytes")
    overhead.add_argument("--requests", type=int, default=4000, help="requests to each server")
    overhead.add_argument("--json", type=Path, help="file to write the result to")
    chosen = parser.parse_args(arguments)
    if chosen.requests < 100:
        print(f"error: --requests: expected at least 100, got {chosen.requests}", file=sys.stderr)
        return 2
    if chosen.json and not chosen.json.parent.is_dir():
        print(f"error: --json {chosen.json}: there is no directory {chosen.json.parent}", file=sys.stderr)
        return 2
    try:
        results = measure(chosen.requests)
        if chosen.json:
            document = {"overhead": [asdict(result) for result in results], "conditions": conditions()}
            chosen.json.write_text(json.dumps(document, indent=2) + "\n")
    except (OSError, ServerStartError, UnexpectedReplyError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for each in results:
        print(f"{each.client}: bare echo {each.echo_us:.0f} us, {each.backend} {each.server_us:.0f} us, medians")
        print(f"  ratio {each.ratio:.2f}, median of rounds; {each.ratio_min:.2f} to {each.ratio_max:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
