"""What the server gets out of a model at saturation: rows a second over HTTP, over those of the model alone.

The model alone is `python -m models bench` with as many rows per batch, on the server's cores, after each load.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from loadtests.affinity import Division, confined, confining
from loadtests.conditions import ROOT
from loadtests.errors import LoadTestError
from loadtests.generator.target import get
from loadtests.peers.comparison import median_and_extremes, spread_of, under_load
from loadtests.peers.servers import BACKEND, OURS, SERVERS, samples
from loadtests.server_process import ServerProcess

WIRE = "binary"
REPETITIONS = 7  # of the model alone
BENCH_LIMIT_S = 300.0


@dataclass(frozen=True, slots=True)
class SaturationPlan:
    """What is measured; `connections` requests of `rows` rows each are under way all the time."""

    model: str
    rows: int
    connections: int
    rounds: int
    seconds: int  # of each load, after a warm-up of a second


@dataclass(frozen=True, slots=True)
class SaturatedRound:
    """One load of one server."""

    served_rows_per_s: float
    batch_rows: float  # of the batch that a request was in, mean
    model_batch_rows: int  # the same, rounded
    model_rows_per_s: float  # of such batches

    @property
    def ratio(self) -> float:
        """Share of the model's own rows a second."""
        return self.served_rows_per_s / self.model_rows_per_s


@dataclass(slots=True)
class Saturation:
    """One way to start the server, over all rounds."""

    flags: tuple[str, ...]
    rounds: list[SaturatedRound] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        figures = {
            "served_rows_per_s": [each.served_rows_per_s for each in self.rounds],
            "batch_rows": [each.batch_rows for each in self.rounds],
            "model_rows_per_s": [each.model_rows_per_s for each in self.rounds],
            "ratio": [each.ratio for each in self.rounds],
        }
        told = {name: median_and_extremes(spread_of(values)) for name, values in figures.items()}
        return {"flags": list(self.flags), **told, "rounds": [asdict(each) for each in self.rounds]}


def ways(cores: int) -> list[Saturation]:
    """Return what is compared: one worker that computes on all cores, and one worker of one thread per core."""
    shapes = dict.fromkeys(((1, cores), (cores, 1)))  # one way where there is one core
    return [Saturation(("--workers", str(workers), "--threads", str(each))) for workers, each in shapes]


def measure(plan: SaturationPlan, found: Sequence[Saturation], division: Division | None = None) -> Iterator[None]:
    """Measure each way in every round, and add each load to `found`; `division` None: server and load share all cores.

    Raises:
        LoadTestError: the server or the model cannot be started, or a reply was wrong.
    """
    loaded, checked = (SERVERS[OURS].exchange(WIRE, each) for each in samples(plan.model, plan.rows))
    room = str(max(1024, 2 * plan.connections) * plan.rows)  # rows in the queue: no request is to be refused
    cpus = division.server if division else None
    with confined(division.generator if division else None):
        for _ in range(plan.rounds):
            for each in found:
                flags = ("--model", plan.model, "--backends", BACKEND, "--max-queue-rows", room, *each.flags)
                with ServerProcess.service(*flags, cpus=cpus) as server:
                    result = under_load(server.port, plan.connections, plan.seconds, loaded, checked)
                    batch_rows = mean_batch_rows(server.port)
                alone = model_alone(plan.model, round(batch_rows), cpus)
                each.rounds.append(SaturatedRound(result.requests_per_s * plan.rows, batch_rows, *alone))
                yield


def mean_batch_rows(port: int) -> float:
    """Return the rows of the batch that a request was in, mean over all requests, from the server's metrics.

    Raises:
        LoadTestError: it has no such metric, or has answered nothing.
    """
    _, text = get("127.0.0.1", port, "/metrics")
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.labels.get("backend") == BACKEND
    }
    try:
        return values["mlp_batch_rows_sum"] / values["mlp_batch_rows_count"]
    except (KeyError, ZeroDivisionError) as error:
        raise LoadTestError(f"/metrics: expected mlp_batch_rows of backend {BACKEND}, got none") from error


def model_alone(model: str, rows: int, cpus: frozenset[int] | None = None) -> tuple[int, float]:
    """Compute batches of `rows` one after the other, without a server; return rows a batch and rows a second.

    Raises:
        LoadTestError: it cannot be measured.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        file = Path(directory) / "bench.json"
        command = [sys.executable, "-m", "models", "bench", model, "--backends", BACKEND, "--rows", str(rows)]
        command += ["--repetitions", str(REPETITIONS), "--json", str(file)]
        command = confining(cpus, command)
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=BENCH_LIMIT_S)
        if done.returncode:
            raise LoadTestError(f"models bench {model}: {last_line(done.stderr.splitlines())}")
        document = json.loads(file.read_text())
    (measured,) = [each for each in document["bench"] if each["backend"] == BACKEND]
    return measured["rows"], measured["rows"] / measured["median_us"] * 1e6


def last_line(lines: Sequence[str]) -> str:
    """Return the last line, or that there is none."""
    return lines[-1] if lines else "it said nothing"
