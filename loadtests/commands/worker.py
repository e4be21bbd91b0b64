"""`worker`: one more process that makes load, for a `compare` or `scenario` that waits for it."""

import argparse
import os
import socket
import sys
from typing import Any

from loadtests.errors import LoadTestError
from loadtests.generator.driver import Driver, new_environment
from loadtests.generator.load import Load
from loadtests.generator.target import Target
from loadtests.generator.version import generator_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--master", required=True, metavar="HOST:PORT", help="address where the command that waits for it listens"
    )
    parser.add_argument("--is-child", action="store_true", help=argparse.SUPPRESS)  # of the command that waits for it


def run(options: argparse.Namespace) -> int:
    """Send the loads that the master asks for, until it ends.

    Raises:
        LoadTestError: there is no master at that address, or it does not want this worker.
    """
    host, _, port = options.master.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16):
        raise LoadTestError(f"--master: expected HOST:PORT, got {options.master!r}")
    try:
        socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise LoadTestError(f"--master {options.master}: there is no such host: {error}") from error
    environment = new_environment("")
    drivers: dict[Target, Driver] = {}
    refusals: list[str] = []
    if not options.is_child:
        print(f"waiting for {options.master}", file=sys.stderr)
    try:
        runner = environment.create_worker_runner(host, int(port))
    except ConnectionError as error:
        raise LoadTestError(f"--master {options.master}: nobody answers there") from error

    def answer(number: int, fault: str | None, tallies: list[dict[str, Any]]) -> None:
        runner.send_message("tally", {"number": number, "fault": fault, "tallies": tallies})

    def send(msg: Any, **_: object) -> None:
        number = msg.data["number"]
        try:
            target = Target.of_message(msg.data["target"])
            if target not in drivers:
                drivers[target] = Driver(environment, target)
            tallies = drivers[target].drive(Load.of_message(msg.data["load"]))
        except (OSError, LoadTestError) as error:
            answer(number, str(error), [])
        except Exception as error:
            answer(number, f"{type(error).__name__}: {error}", [])
            raise
        else:
            answer(number, None, [each.message() for each in tallies])

    def go(msg: Any, **_: object) -> None:
        refusals.append(msg.data)
        runner.greenlet.kill(block=False)

    runner.register_message("load", send, concurrent=True)
    runner.register_message("refused", go)
    hello = {"host": socket.gethostname(), "version": generator_version(), "is_child": options.is_child}
    runner.send_message("hello", hello)
    parent = os.getppid()
    while not runner.greenlet.join(timeout=1.0):  # the group is empty once the master has said quit
        if options.is_child and os.getppid() != parent:
            return 1  # whoever started it is gone
    if refusals:
        raise LoadTestError(f"--master {options.master}: this worker gets no load: {refusals[0]}")
    return 0
