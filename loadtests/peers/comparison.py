"""This server against others: the same model, rows and load for each, one at a time, in interleaved rounds."""

import http.client
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loadtests.peers.server_tree import ServerTree, ServerTreeError
from loadtests.peers.servers import OURS, SERVERS, Exchange, PeerError, Sample, Server, StatusError
from loadtests.peers.wrk import LoadError, WrkResult, load
from loadtests.report.points import Spread
from loadtests.server_process import free_port

START_LIMIT_S = 120.0
WARM_UP_S = 1
CHECK_EVERY_S = 0.5  # while the load runs
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PeerPlan:
    """What is measured."""

    servers: tuple[str, ...]
    models: tuple[str, ...]
    wires: tuple[str, ...]
    connections: tuple[int, ...]
    rounds: int
    seconds: int  # of each load, after a warm-up of a second
    rows: int  # in each request


@dataclass(slots=True)
class Cell:
    """One server under one load, over all rounds."""

    server: str
    model: str
    wire: str
    connections: int
    loads: dict[int, WrkResult] = field(default_factory=dict)  # by round
    failure: str | None = None  # why there are no figures, or why not to believe them
    is_supported: bool = True  # False: the server has no such wire

    def document(self, ours: "Cell | None") -> dict[str, Any]:
        """Return the cell as JSON has it; `ours` is this server's cell under the same load."""
        loads = list(self.loads.values())
        figures: dict[str, Any] = dict.fromkeys(("requests_per_s", "p50_ms", "p99_ms", "ratio"))
        if self.failure is None and loads:
            figures = {
                "requests_per_s": median_and_extremes(spread_of([each.requests_per_s for each in loads])),
                "p50_ms": median_and_extremes(spread_of([each.p50_us / 1e3 for each in loads])),
                "p99_ms": median_and_extremes(spread_of([each.p99_us / 1e3 for each in loads])),
                "ratio": median_and_extremes(ratio(ours, self)),
            }
        return {
            "server": self.server,
            "model": self.model,
            "wire": self.wire,
            "connections": self.connections,
            **figures,
            "generator_cpu": max((each.generator_cpu for each in loads), default=None),
            "failure": self.failure,
            "is_supported": self.is_supported,
            "loads": [{"round": number} | asdict(each) for number, each in self.loads.items()],
        }


@dataclass(slots=True)
class Start:
    """How a server started with one model and one wire, over all rounds."""

    server: str
    model: str
    wire: str
    seconds: list[float] = field(default_factory=list)  # from the start of the process to the first good answer
    memory_mib: list[float] = field(default_factory=list)  # after the loads, all processes together

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "server": self.server,
            "model": self.model,
            "wire": self.wire,
            "start_s": median_and_extremes(spread_of(self.seconds)),
            "memory_mib": median_and_extremes(spread_of(self.memory_mib)),
        }


def median_and_extremes(spread: Spread | None) -> dict[str, float] | None:
    """Return what JSON has of a spread, to four digits."""
    if spread is None:
        return None
    told = {"median": spread.median, "min": spread.low, "max": spread.high}
    return {name: float(f"{value:.4g}") for name, value in told.items()}


def spread_of(values: Sequence[float]) -> Spread | None:
    """Return the spread of values; None where there are none."""
    return Spread.of(values) if values else None


def ratio(ours: Cell | None, theirs: Cell) -> Spread | None:
    """Return this server's requests a second over the other's, each of the same round; None without a common round."""
    if ours is None or ours.failure or theirs.failure:
        return None
    common = ours.loads.keys() & theirs.loads.keys()
    return spread_of([ours.loads[each].requests_per_s / theirs.loads[each].requests_per_s for each in sorted(common)])


class PeerComparison:
    """The measurement, as far as it has come."""

    def __init__(self, plan: PeerPlan, samples: dict[str, tuple[Sample, Sample]], logs: Path) -> None:
        """`samples` has each model's rows, `logs` takes what servers wrote that failed."""
        self.plan = plan
        self._samples = samples
        self._logs = logs
        loads = [(model, wire, server) for model in plan.models for wire in plan.wires for server in plan.servers]
        self.cells = {
            (server, model, wire, count): Cell(server, model, wire, count)
            for model, wire, server in loads
            for count in plan.connections
        }
        self.starts = {(server, model, wire): Start(server, model, wire) for model, wire, server in loads}
        for name, model, wire in self.starts:
            if wire not in SERVERS[name].wires:
                for cell in self._cells(name, model, wire):
                    cell.is_supported = False

    @property
    def failures(self) -> list[Cell]:
        """The cells that have no figures and should."""
        return [cell for cell in self.cells.values() if cell.failure]

    def run(self) -> Iterator[Start]:
        """Measure every cell in every round, and say after each start what has been measured.

        A server that fails is not tried again, and takes nothing from the others. The order changes from round to
        round, so that none is always the first to find the machine cool.
        """
        for number in range(self.plan.rounds):
            turn = number % len(self.plan.servers)
            order = self.plan.servers[turn:] + self.plan.servers[:turn]
            for model in self.plan.models:
                for wire in self.plan.wires:
                    for name in order:
                        self._measure(number, name, model, wire)
                        yield self.starts[name, model, wire]

    def document(self) -> dict[str, Any]:
        """Return what is known so far, as JSON has it."""
        return {
            "plan": asdict(self.plan),
            "cells": [
                cell.document(self.cells.get((OURS, cell.model, cell.wire, cell.connections)))
                for cell in self.cells.values()
            ],
            "starts": [each.document() for each in self.starts.values()],
        }

    def _cells(self, name: str, model: str, wire: str) -> list[Cell]:
        return [self.cells[name, model, wire, count] for count in self.plan.connections]

    def _measure(self, number: int, name: str, model: str, wire: str) -> None:
        cells = [cell for cell in self._cells(name, model, wire) if cell.is_supported and not cell.failure]
        if not cells:
            return
        server = SERVERS[name]
        if server.missing:
            fail(cells, server.missing)
            return
        loaded, checked = (server.exchange(wire, sample) for sample in self._samples[model])
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{name}-{Path(model).name}-{wire}.log"
        try:
            with free_port() as port:
                self._load(number, cells, tree(server, model, wire, self.plan.rows, port, log), port, loaded, checked)
        except (ServerTreeError, PeerError) as error:
            fail([cell for cell in cells if number not in cell.loads] or cells, str(error))
        if not any(cell.failure for cell in cells):
            log.unlink(missing_ok=True)

    def _load(
        self, number: int, cells: list[Cell], server: ServerTree, port: int, loaded: Exchange, checked: Exchange
    ) -> None:
        start = self.starts[cells[0].server, cells[0].model, cells[0].wire]
        with server:
            start.seconds.append(server.wait(lambda: answers(checked, port), START_LIMIT_S))
            for cell in cells:
                try:
                    cell.loads[number] = under_load(port, cell.connections, self.plan.seconds, loaded, checked)
                except (PeerError, LoadError) as error:
                    cell.failure = f"round {number + 1}: {error}"
            start.memory_mib.append(server.memory_bytes() / MIB)


def answers(exchange: Exchange, port: int) -> bool:
    """Return whether a server that is starting answers by now.

    Raises:
        PeerError: it answers, and wrongly.
    """
    try:
        exchange.check(port)
    except (StatusError, OSError, http.client.HTTPException):
        return False
    return True


def under_load(port: int, connections: int, seconds: int, loaded: Exchange, checked: Exchange) -> WrkResult:
    """Load a server after a second of warm-up; check its answers before, while it is loaded, and after.

    The check before the load comes after the warm-up, and waits until what that left in the server's queue is done.

    Raises:
        PeerError: a wrong answer, or none.
        LoadError: an error reply, a broken connection, or wrk itself failed.
    """

    def check(when: str, exchange: Exchange) -> None:
        try:
            exchange.check(port)
        except (PeerError, OSError, http.client.HTTPException) as error:
            raise PeerError(f"{when} the load: {error}") from error

    load(port, loaded.path, loaded.headers, loaded.body, connections, WARM_UP_S)
    check("before", loaded)
    faults: list[PeerError] = []
    ended = threading.Event()

    def watch() -> None:
        while True:
            try:
                check("under", checked)
            except PeerError as error:
                faults.append(error)
                return
            if ended.wait(CHECK_EVERY_S):
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = load(port, loaded.path, loaded.headers, loaded.body, connections, seconds)
    finally:
        ended.set()
        watcher.join()
    if faults:
        raise faults[0]
    if result.fault:
        raise LoadError(result.fault)
    check("after", loaded)
    return result


def tree(server: Server, model: str, wire: str, rows: int, port: int, log: Path) -> ServerTree:
    """Return a server's processes, not yet started."""
    return ServerTree(server.command(model, rows, port), server.environ(model, wire, rows, port), log)


def fail(cells: Sequence[Cell], reason: str) -> None:
    """Give cells the reason why they have no figures."""
    for cell in cells:
        cell.failure = cell.failure or reason
