"""`python -m loadtests`: measurements of a running server, over HTTP alone."""

import os
import sys
from importlib import import_module

from loadtests import interruption
from loadtests.errors import LoadTestError
from loadtests.flags import Help, Parser

# Name to one line of help. Only the chosen one's module is imported: locust patches the standard library where it is.
COMMANDS = {
    "compare": "each backend under closed and open loop, in interleaved rounds, and the rate that each holds",
    "overhead": "one request at a time against a bare ASGI echo of the same bytes",
    "peers": "this server against stock LitServe, FastAPI, BentoML, Ray Serve and mosec under the same load",
    "report": "the page and the charts of what a comparison left behind",
    "saturation": "rows a second at saturation, over those of the model without a server",
    "scenario": "a named load, held to an objective",
    "worker": "one more process that makes load, on this host or another",
}


def main(arguments: list[str]) -> int:
    """Run one subcommand, `loadtests/commands/NAME.py`.

    Returns:
        Its status; with a line on stderr 2 where it could not be run, and 130 where it was interrupted.
    """
    open_closed_streams()
    interruption.handle()
    try:
        return interruption.interruptible(lambda: run(arguments))
    except BrokenPipeError:  # nobody reads what is printed; files are written by now
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (OSError, LoadTestError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


def run(arguments: list[str]) -> int:
    """Parse the flags of a subcommand, run it, and write out what it printed.

    Raises:
        LoadTestError, OSError: it could not be run.
        SystemExit: the flags are none of its.
    """
    parser = Parser(prog="python -m loadtests", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, dest="command")
    parsers = {  # flags in full: what leaves the key out of a document looks for `--key`
        name: commands.add_parser(name, help=line, description=line, allow_abbrev=False, formatter_class=Help)
        for name, line in COMMANDS.items()
    }
    name = arguments[0] if arguments else ""
    if name not in parsers:
        parser.parse_args(arguments)  # prints the help, or what is wrong with the name, and exits
        parser.error(f"expected a command first, got {name!r}")
    try:
        module = import_module(f"loadtests.commands.{name}")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == __package__:
            raise
        raise LoadTestError(f"{name} needs {package}, which is not installed; run `make setup-dev`") from error
    module.add_arguments(parsers[name])
    own, server = arguments[1:], []
    if "--" in own and parsers[name].get_default("service_flags") is not None:
        place = own.index("--")
        own, server = own[:place], own[place + 1 :]
    options = parsers[name].parse_args(own)
    if server:
        options.service_flags = server
    status = int(module.run(options))
    sys.stdout.flush()
    return status


def open_closed_streams() -> None:
    """Open the null device where a standard stream is closed, lest a connection takes its place and is written to."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115  until the end
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


if __name__ == "__main__":
    status = main(sys.argv[1:])
    interruption.ignore()
    sys.exit(status)
