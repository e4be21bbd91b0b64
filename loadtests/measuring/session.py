"""A server and a generator that are ready to measure, as `compare` and `scenario` both need them."""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from loadtests import affinity
from loadtests.affinity import AffinityError, Division, confined, listed
from loadtests.connection import headers_of, status_of
from loadtests.errors import UNREADABLE, LoadTestError
from loadtests.evidence import Run
from loadtests.flags import MOST_CONNECTIONS, MOST_ROWS, names, path, positive, seconds, up_to, whole
from loadtests.generator.open_files import require_open_files
from loadtests.generator.processes import Generator, listening_address
from loadtests.generator.target import Target, TargetError, address, payloads
from loadtests.inference import WIRES, ReplyError, outputs_of, stages_of
from loadtests.measuring.expected import REFERENCE, TOLERANCE, expected_rows
from loadtests.measuring.generator_watch import busy_warning
from loadtests.measuring.inspection import chosen, inspect, require_taken, said, served_model
from loadtests.measuring.measurement import Measurement
from loadtests.measuring.server_watch import busy_cores
from loadtests.server_process import ROOT, ServerProcess, require_free_flags

MODEL = "digits"  # of a server that is started
MOST_PROCESSES = 256
MOST_PID = (1 << 22) - 1  # of Linux
LOOK_S = 0.5  # at the host, before it is loaded
MOST_SEED = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Session:
    """The server that is measured, and what measures it."""

    target: Target
    backends: dict[str, str]  # name to implementation
    generator: Generator
    measurement: Measurement
    server_pid: int | None
    most_rows: int | None  # of one request; None: the server does not say
    cpus: dict[str, str]  # of the server that was started and of the generator; empty: they share all


def add_arguments(parser: argparse.ArgumentParser, name: str = "") -> None:
    """Add the flags that say which server is loaded, with what, and from how many processes.

    `name` stands before them in the usage.
    """
    parser.usage = f"{parser.prog} {name}[model] --out OUT [flags] [-- flags of the server that is started]"
    parser.set_defaults(service_flags=[])  # what stands behind `--`
    parser.add_argument(
        "model",
        nargs="?",
        help=f"model directory, or a name under models/zoo (default: {MODEL}, or what --url's server has)",
    )
    parser.add_argument("--url", help="a running server that has the model; without it one is started and ended")
    parser.add_argument(
        "--server-pid",
        type=up_to(MOST_PID),
        help="the process of --url's server, if it runs on this host",
    )
    affinity.add_argument(parser)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32", help="the server's number format")
    parser.add_argument("--backends", type=names, default="eager,compiled,fused", help="comma-separated")
    parser.add_argument("--rows", type=up_to(MOST_ROWS), default=1, help="rows in each request")
    parser.add_argument("--wire", choices=WIRES, default="json", help="how rows and outputs travel")
    parser.add_argument("--objective-ms", type=positive, default=50.0, help="the most that the p99 may be")
    parser.add_argument("--seconds", type=seconds, default=5.0, help="measured seconds of each load")
    parser.add_argument("--warm-up-s", type=seconds, default=1.0, help="seconds of each load before those")
    parser.add_argument(
        "--seed", type=partial(whole, least=0, most=MOST_SEED), default=0, help="seed of rows and arrivals"
    )
    parser.add_argument(
        "--max-in-flight",
        type=up_to(MOST_CONNECTIONS),
        default=512,
        help="most unanswered requests at a time in an open loop",
    )
    parser.add_argument(
        "--processes", type=up_to(MOST_PROCESSES), default=1, help="processes that make load on this host"
    )
    parser.add_argument(
        "--remote-workers",
        type=partial(whole, least=0, most=MOST_PROCESSES),
        default=0,
        help="workers on other hosts to wait for",
    )
    parser.add_argument("--bind", default="127.0.0.1", help="HOST or HOST:PORT that remote workers connect to")
    parser.add_argument("--key", default="", help="the server's key; better set as MLP_API_KEY")
    parser.add_argument("--out", type=path, required=True, help="directory to write to")


def served_name(model: str) -> str:
    """Return the name under which the server offers a model directory, or a name under models/zoo.

    Raises:
        LoadTestError: there is no such model.
    """
    directory = Path(model) if Path(model).is_dir() else ROOT / "models" / "zoo" / model
    try:
        return str(json.loads((directory / "config.json").read_text())["name"])
    except (OSError, *UNREADABLE) as error:
        raise LoadTestError(f"expected a model directory, or a name under models/zoo, got {model!r}") from error


def name_at_url(model: str) -> str:
    """Return the name of a model that a running server has: that of a directory, or the name itself.

    Raises:
        LoadTestError: it is a path, and nothing is there.
    """
    if Path(model).is_dir():
        return served_name(model)
    if os.sep in model:
        raise LoadTestError(f"{model}: no such directory")
    return model


@contextmanager
def session(
    options: argparse.Namespace, keep: Callable[[Run], None], most_connections: int, most_times: int = 1
) -> Iterator[Session]:
    """Start what is needed, try each backend once, and end it all afterwards.

    Any load has at most so many connections, and any request at most so many times `--rows` rows.

    Raises:
        LoadTestError, OSError: something is missing, or does not answer as expected.
    """
    if options.server_pid is not None and not psutil.pid_exists(options.server_pid):
        raise LoadTestError(f"--server-pid: there is no process {options.server_pid} on this host")
    if options.service_flags and options.url is not None:
        raise LoadTestError(
            f"-- {shlex.join(options.service_flags)}: expected no flags of a server beside --url, which is running"
        )
    if options.server_cpus is not None and options.url is not None:
        raise AffinityError(
            f"--server-cpus {listed(options.server_cpus)}: expected no --url, whose server runs already; "
            f"it can be started with `taskset -c {listed(options.server_cpus)}`"
        )
    if options.remote_workers and options.url is None:
        raise LoadTestError("--remote-workers: expected --url with an address that they can reach")
    if options.max_in_flight < options.processes + options.remote_workers:
        raise LoadTestError(f"--max-in-flight {options.max_in_flight}: expected at least one for each process")
    require_free_flags(options.service_flags)
    division = None if options.server_cpus is None else Division.of(options.server_cpus)
    with listening_address(options.bind):
        pass  # somebody can listen there
    share = -(-most_connections // (options.processes + options.remote_workers))
    require_open_files(share)
    key = options.key or os.environ.get("MLP_API_KEY", "")
    if not (key.isascii() and key.isprintable()):
        raise LoadTestError("--key: expected a key of printable ASCII characters, as a header carries them")
    most_asked = options.rows * most_times

    def require_rows(port: int) -> None:
        try:
            served = served_model("127.0.0.1", port, key)
        except TargetError:  # it has ended by now, which is told by how it did
            return
        require_taken(most_asked, served)

    with ExitStack() as stack:
        stack.enter_context(confined(division.generator if division else None))
        if options.url is None:
            model, pid = served_name(options.model or MODEL), None
            flags = ["--model", options.model or MODEL, "--dtype", options.dtype, *options.service_flags]
            flags += ["--backends", ",".join(dict.fromkeys([REFERENCE, *options.backends]))]
            cpus_of_server = division.server if division else None
            server = stack.enter_context(
                ServerProcess.service(*flags, key=key, cpus=cpus_of_server, on_answer=require_rows)
            )
            (host, port), pid = ("127.0.0.1", server.port), server.pid
        else:
            (host, port), pid = address(options.url), options.server_pid
            model = options.model and name_at_url(options.model)
        target, ready, served = inspect(host, port, model, options.wire, options.seed, key, most_asked, options.dtype)
        wanted = chosen(options.backends, ready)
        chosen([REFERENCE], ready)  # the expected rows come from it
        first_ms = {backend: first_request_ms(target, backend, options.rows) for backend in wanted}
        expected = expected_rows(target, options.dtype)
        if (warning := busy_warning(busy_cores(LOOK_S), psutil.cpu_count() or 1)) is not None:
            print(warning, file=sys.stderr)
        generator = stack.enter_context(Generator(target, options.processes, options.remote_workers, options.bind))
        measurement = Measurement(generator, expected, options.objective_ms, pid, keep, served.device != "cpu")
        measurement.first_ms |= first_ms
        cpus = division.conditions if division else {}
        yield Session(target, wanted, generator, measurement, pid, served.most_rows, cpus)


def first_request_ms(target: Target, backend: str, rows: int) -> float:
    """Send a backend its first request, and return how long it took.

    Raises:
        TargetError: the reply is not as it has to be.
    """
    sent = payloads(target, backend, rows)[0]
    with target.connect() as connection:
        start_s = time.perf_counter()
        head, body = target.ask(connection, sent.request, f"backend {backend}")
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
    if status_of(head) != 200:
        raise TargetError(f"backend {backend}, {rows} rows: {said(status_of(head), body)}")
    try:
        outputs_of(sent.inference, headers_of(head), body)
        stages_of(headers_of(head))
    except ReplyError as error:
        raise TargetError(f"backend {backend}: {error}") from error
    return elapsed_ms
