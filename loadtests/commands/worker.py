"""`worker`: one more process that makes load, for a `compare` or `scenario` that waits for it."""

import argparse
import os

from loadtests.errors import LoadTestError
from loadtests.generator.driver import Driver, new_environment
from loadtests.generator.load import Load
from loadtests.generator.target import Target


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--master", required=True, metavar="HOST:PORT", help="where the command that started it listens"
    )


def run(options: argparse.Namespace) -> int:
    """Send the loads that the master asks for, until it ends.

    Raises:
        LoadTestError: there is no master at that address.
    """
    host, _, port = options.master.rpartition(":")
    if not host or not port.isdecimal():
        raise LoadTestError(f"--master: expected HOST:PORT, got {options.master!r}")
    environment = new_environment("")
    drivers: dict[Target, Driver] = {}
    try:
        runner = environment.create_worker_runner(host, int(port))
    except ConnectionError as error:
        raise LoadTestError(f"--master {options.master}: nobody answers there") from error

    def send(msg: object, **_: object) -> None:
        document = msg.data  # type: ignore[attr-defined]
        target = Target.of_message(document["target"])
        if target not in drivers:
            drivers[target] = Driver(environment, target)
        tallies = drivers[target].drive(Load.of_message(document["load"]))
        runner.send_message("tally", [each.message() for each in tallies])  # type: ignore[arg-type]

    runner.register_message("load", send, concurrent=True)
    parent = os.getppid()
    while not runner.greenlet.join(timeout=1.0):  # the group is empty once the master has said quit
        if os.getppid() != parent:
            return 1  # whoever started it is gone
    return 0
