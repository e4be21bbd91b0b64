"""A fork server: commands run to their end in processes which have their imports behind them.

Importing locust and matplotlib takes a second of a core. One process does it once and then forks for each command,
which finds its flags, its environment and its streams as if it had been started by itself.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0  # for a command, below that of a test
LOADING = ("loadtests.commands.compare", "loadtests.commands.scenario")
# Nothing else of the standard library is taken before the imports, which patch it as they do in a command of its own.
FORKING = """
import gc, importlib, json, os, runpy, sys
fork, wait = os.fork, os.waitpid
for module in sys.argv[1:]:
    importlib.import_module(module)
gc.freeze()
while line := sys.stdin.readline():
    (program, *arguments), environment, output, errors = json.loads(line)
    child = fork()
    if not child:
        os.environ.clear()
        os.environ.update(environment)
        for number, path in enumerate((os.devnull, output, errors)):
            os.dup2(os.open(path, os.O_RDWR), number)
        sys.argv[1:] = arguments
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        sys.exit()
    print(os.waitstatus_to_exitcode(wait(child, 0)[1]), flush=True)
"""


_servers: "dict[tuple[str, ...], subprocess.Popen[str]]" = {}


def _server(modules: tuple[str, ...]) -> "subprocess.Popen[str]":
    """Return what forks with these modules imported, started where there is none; it ends with the tests."""
    if modules not in _servers:
        pipe = subprocess.PIPE
        _servers[modules] = subprocess.Popen(
            [sys.executable, "-c", FORKING, *modules], cwd=ROOT, stdin=pipe, stdout=pipe, text=True, process_group=0
        )
    return _servers[modules]


def _end(modules: tuple[str, ...]) -> None:
    """End one, with the command that it waits for."""
    process = _servers.pop(modules)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@atexit.register
def _end_all() -> None:
    for modules in list(_servers):
        _end(modules)


def run_loadtests(*arguments: str, environment: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    """Run a command of the load tests; those that make load patch the standard library, and fork from another."""
    name = f"loadtests.commands.{arguments[0]}"
    return run(LOADING if name in LOADING else (name,), ["loadtests", *arguments], environment)


def run(
    modules: tuple[str, ...], arguments: list[str], environment: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with these arguments from the root to its end, with `modules` imported beforehand.

    Raises:
        subprocess.TimeoutExpired: it took too long, and was ended.
    """
    process = _server(modules)
    assert process.stdin is not None
    assert process.stdout is not None
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        try:
            print(json.dumps([arguments, dict(environment), output.name, errors.name]), file=process.stdin, flush=True)
            if not select.select([process.stdout], [], [], LIMIT_S)[0]:
                raise subprocess.TimeoutExpired(arguments, LIMIT_S, output.read(), errors.read())
            status = process.stdout.readline()
            assert status, "the fork server ended"
        except (
            BaseException
        ):  # among them the test's own limit: the status that is still to come would be the next one's
            _end(modules)
            raise
        return subprocess.CompletedProcess(arguments, int(status), output.read(), errors.read())
