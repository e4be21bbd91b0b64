"""The load generator: one process, or locust's master with workers on this host and others."""

import csv
import subprocess
import sys
import time
from collections.abc import Callable
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
from loadtests.server_process import ROOT, free_port

CONNECT_LIMIT_S = 60.0
END_LIMIT_S = 10.0
GRACE_S = 2 * ANSWER_LIMIT_S + 10.0  # what a load may take beyond its seconds


class GeneratorError(LoadTestError):
    """A generator process did not start, or ended before its time."""


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
        self._told: list[list[Tally]] = []

    def __enter__(self) -> Self:
        """Start the processes.

        Raises:
            GeneratorError: they did not start.
        """
        if self.count == 1 and self._processes == 1:
            self.environment.create_local_runner()
            self._driver = Driver(self.environment, self.target)
        else:
            self._start_workers()
        self._history = gevent.spawn(stats_history, self.environment.runner)
        return self

    def __exit__(self, *_: object) -> None:
        """End them."""
        self._history.kill()
        if self.environment.runner is not None:
            self.environment.runner.quit()
        for worker in self._workers:
            try:
                worker.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()

    def run(self, load: Load) -> list[Tally]:
        """Send a load; return what each kind of request came to.

        Raises:
            GeneratorError: a process ended meanwhile.
        """
        runner: Any = self.environment.runner
        if load.loop == "shape":
            gevent.spawn(runner.start_shape)
        if not isinstance(runner, MasterRunner):
            return self._driver.drive(load)
        self._told.clear()
        for index, worker in enumerate(sorted(runner.clients)):
            share = load.share(index, self.count)
            runner.send_message("load", {"target": self.target.message(), "load": share.message()}, worker)
        self._wait(lambda: len(self._told), load.warm_up_s + load.seconds + GRACE_S, "answers of workers")
        kinds = [Tally(backend, rows) for backend, rows in load.kinds]
        for tallies in self._told:
            for kind, tally in zip(kinds, tallies, strict=True):
                kind.add(tally)
        return kinds

    def write_statistics(self, directory: Path) -> list[Path]:
        """Write locust's own HTML page and CSV files."""
        page = directory / "locust.html"
        html: Any = get_html_report
        page.write_text(html(self.environment, show_download_link=False))
        tables = StatsCSV(self.environment, PERCENTILES_TO_REPORT)
        written = [page]
        for name, write in (("stats", tables.requests_csv), ("failures", tables.failures_csv)):
            written.append(directory / f"locust_{name}.csv")
            with written[-1].open("w", newline="") as file:
                write(csv.writer(file))
        return written

    def _start_workers(self) -> None:
        port = free_port()
        runner: Any = self.environment.create_master_runner(self._bind, port)
        runner.register_message("tally", self._hear)
        command = [sys.executable, "-m", "loadtests", "worker", "--master", f"127.0.0.1:{port}"]
        for _ in range(self._processes):
            self._workers.append(subprocess.Popen(command, cwd=ROOT, process_group=0))
        if self.count > self._processes:
            print(
                f"waiting for {self.count - self._processes} workers: python -m loadtests worker --master HOST:{port}"
            )
        self._wait(lambda: int(runner.worker_count), CONNECT_LIMIT_S, "workers")

    def _hear(self, msg: Any, **_: object) -> None:
        self._told.append([Tally.of_message(each) for each in msg.data])

    def _wait(self, counted: Callable[[], int], seconds: float, what: str) -> None:
        limit_s = time.monotonic() + seconds
        while (count := counted()) < self.count:
            ended = [worker.returncode for worker in self._workers if worker.poll() is not None]
            if ended:
                raise GeneratorError(f"a generator process ended with {ended[0]}; its last lines stand above")
            if time.monotonic() > limit_s:
                raise GeneratorError(f"expected {self.count} {what} within {seconds:g} s, got {count}")
            gevent.sleep(0.02)
