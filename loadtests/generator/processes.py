"""The load generator: one process, or locust's master with workers on this host and others."""

import csv
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import gevent
from locust.html import get_html_report
from locust.runners import MasterRunner
from locust.stats import PERCENTILES_TO_REPORT, StatsCSV, stats_history

from loadtests.errors import LoadTestError
from loadtests.generator.driver import Driver, new_environment
from loadtests.generator.load import Load
from loadtests.generator.tally import Tally
from loadtests.generator.target import ANSWER_LIMIT_S, Target
from loadtests.generator.version import generator_version
from loadtests.output import OutputError
from loadtests.server_process import ROOT

CONNECT_LIMIT_S = 60.0
END_LIMIT_S = 10.0
SILENT_LIMIT_S = 10  # without a heartbeat, which comes every second: a worker elsewhere is taken for gone
EVERY_ADDRESS = ("0.0.0.0", "*")  # noqa: S104  where the user binds to them
GRACE_S = 2 * ANSWER_LIMIT_S + 10.0  # what a load may take beyond its seconds


class GeneratorError(LoadTestError):
    """A generator process did not start, ended before its time, or could not send its load."""


@contextmanager
def listening_address(bind: str) -> Iterator[tuple[str, int]]:
    """The address that `bind`, HOST or HOST:PORT, names, with a free port where it names none.

    The system gives the port to nobody else meanwhile; who sets SO_REUSEADDR, as ZeroMQ does, can listen on it.

    Raises:
        GeneratorError: it is no such thing, or nobody can listen there.
    """
    host, colon, port = bind.partition(":")
    if not host or (colon and not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16)):
        raise GeneratorError(f"--bind: expected HOST or HOST:PORT, with an address of IP version 4, got {bind!r}")
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            address = socket.gethostbyname("0.0.0.0" if host == "*" else host)  # noqa: S104  the user's wish
            held.bind((address, int(port or 0)))
        except (OSError, UnicodeError) as error:
            told = f"--bind {bind}: expected an address of this host that is free, got: {error}"
            raise GeneratorError(told) from error
        yield address, held.getsockname()[1]


class Generator:
    """A context manager around the processes that make the load."""

    def __init__(self, target: Target, processes: int = 1, remote: int = 0, bind: str = "127.0.0.1") -> None:
        """`processes` on this host, and `remote` that are started elsewhere: `python -m loadtests worker`."""
        self.target = target
        self.environment = new_environment(f"http://{target.host}:{target.port}")
        self.count = processes + remote
        self._processes = processes
        self._bind = bind
        self._workers: list[subprocess.Popen[bytes]] = []
        self._hosts: dict[str, str] = {}  # of the workers that make the load, by locust's name of each
        self._remote = 0  # of them, those that were started elsewhere
        self._number = 0  # of the load, so that no answer is taken for another's
        self._told: dict[str, list[Tally]] = {}
        self._fault: str | None = None

    def __enter__(self) -> Self:
        """Start the processes.

        Raises:
            GeneratorError: they did not start.
        """
        if self.count == 1 and self._processes == 1:
            self.environment.create_local_runner()
            self._driver = Driver(self.environment, self.target)
        else:
            try:
                self._start_workers()
            except BaseException:
                self._end()
                raise
        self._history = gevent.spawn(stats_history, self.environment.runner)
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self._history.kill()
        self._end()

    def run(self, load: Load) -> list[Tally]:
        """Send a load; return the tally of each kind of request.

        Raises:
            GeneratorError: a process ended meanwhile, or could not send it.
        """
        runner: Any = self.environment.runner
        if load.loop == "shape":
            gevent.spawn(runner.start_shape)
        if not isinstance(runner, MasterRunner):
            return self._driver.drive(load)
        self._number += 1
        self._told.clear()
        for index, worker in enumerate(sorted(self._hosts)):
            share = load.share(index, self.count).message()
            message = {"number": self._number, "target": self.target.message(), "load": share}
            runner.send_message("load", message, worker)
        self._wait(self._told, load.warm_up_s + load.seconds + GRACE_S, "answers of workers")
        kinds = [Tally(backend, rows) for backend, rows in load.kinds]
        for tallies in self._told.values():
            for kind, tally in zip(kinds, tallies, strict=True):
                kind.add(tally)
        return kinds

    def write_statistics(self, measured: Path) -> list[Path]:
        """Write locust's own HTML page and CSV files beside the document that holds what was measured.

        Raises:
            OutputError: they cannot be written; it names that document.
        """
        directory = measured.parent
        page = directory / "locust.html"
        html: Any = get_html_report
        tables = StatsCSV(self.environment, PERCENTILES_TO_REPORT)
        written = [page]
        try:
            page.write_text(html(self.environment, show_download_link=False))
            for name, write in (("stats", tables.requests_csv), ("failures", tables.failures_csv)):
                written.append(directory / f"locust_{name}.csv")
                with written[-1].open("w", newline="") as file:
                    write(csv.writer(file))
        except OSError as error:
            raise OutputError(f"{directory}: {error}; what was measured is in {measured}") from error
        return written

    def _start_workers(self) -> None:
        with listening_address(self._bind) as (host, port):
            runner: Any = self.environment.create_master_runner(host, port)
        runner.register_message("hello", self._meet)
        runner.register_message("tally", self._hear)
        master = f"{'127.0.0.1' if host in EVERY_ADDRESS else host}:{port}"
        command = [sys.executable, "-m", "loadtests", "worker", "--master", master, "--is-child"]
        for _ in range(self._processes):
            self._workers.append(subprocess.Popen(command, cwd=ROOT, process_group=0))
        if (remote := self.count - self._processes) > 0:
            at = f"HOST:{port}" if host in EVERY_ADDRESS else master
            start = f"python -m loadtests worker --master {at}"
            print(f"waiting {CONNECT_LIMIT_S:g} s for {remote} from elsewhere: {start}", file=sys.stderr)
        self._wait(self._hosts, CONNECT_LIMIT_S, "workers")

    def _end(self) -> None:
        if self.environment.runner is not None:
            self.environment.runner.quit()
        for worker in self._workers:
            try:
                worker.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def _meet(self, msg: Any, **_: object) -> None:
        """Accept a worker that says hello, or turn it away."""
        runner: Any = self.environment.runner
        host, version, is_child = (msg.data[name] for name in ("host", "version", "is_child"))
        remote = self.count - self._processes
        if version != generator_version():
            refusal = f"it is of another version: {version}, and not {generator_version()}; start it from this checkout"
        elif not is_child and self._remote >= remote:
            refusal = f"--remote-workers {remote} are there already"
        else:
            self._hosts[msg.node_id] = host
            self._remote += not is_child
            return
        print(f"a worker on {host} gets no load: {refusal}", file=sys.stderr)
        runner.send_message("refused", refusal, msg.node_id)

    def _hear(self, msg: Any, **_: object) -> None:
        if msg.node_id not in self._hosts or msg.data["number"] != self._number:
            return  # of a load that was given up
        if msg.data["fault"] is not None:
            self._fault = f"a worker on {self._hosts[msg.node_id]} could not send its load: {msg.data['fault']}"
            return
        self._told[msg.node_id] = [Tally.of_message(each) for each in msg.data["tallies"]]

    def _wait(self, those: dict[str, Any], seconds: float, what: str) -> None:
        """Wait until there is one of each worker.

        Raises:
            GeneratorError: one ended, or said that it could not, or did not come in time.
        """
        clients: Any = self.environment.runner.clients  # type: ignore[union-attr]
        limit_s = time.monotonic() + seconds
        while len(those) < self.count:
            ended = [worker.returncode for worker in self._workers if worker.poll() is not None]
            if ended:
                raise GeneratorError(f"a generator process ended with {ended[0]}; its last lines stand above")
            for worker in self._hosts.keys() - self._told.keys():
                if worker not in clients or clients[worker].heartbeat < -SILENT_LIMIT_S:
                    raise GeneratorError(f"the worker on {self._hosts[worker]} is gone")
            if self._fault is not None:
                raise GeneratorError(self._fault)
            if time.monotonic() > limit_s:
                raise GeneratorError(f"expected {self.count} {what} within {seconds:g} s, got {len(those)}")
            gevent.sleep(0.02)
