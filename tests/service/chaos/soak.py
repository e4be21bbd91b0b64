"""Load with kills and reloads: `PYTHONPATH=. python tests/service/chaos/soak.py --seconds 600 --json FILE`.

First `eager` answers every question, one at a time: that is what is right. Then the capacity is measured, by callers
that send as soon as they are answered. Then they send at 70% of it while a worker is killed every few seconds, the
default backend is switched, and the whole server is reloaded: it is told to end and started anew on its port, which is
how another model or setting takes its place. At the end the callers' counts and the server's agree to the request,
every request that was taken has had its answer, the answers are those of `eager`, each server ended with status 0, and
no process has grown.
"""

import argparse
import collections
import http.client
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.conditions import conditions
from tests.made_model import write_made_model
from tests.service.running_server import TITLE, RunningServer, descendants, free_port, resident_kib, title

CALLERS = 8
QUESTIONS = 30  # of each caller
MEASURE_S = 5.0
SHARE = 0.7  # of capacity
KILL_EVERY_S = 15.0
SWITCH_EVERY_S = 3.0
RELOAD_EVERY_S = 45.0
SAMPLE_EVERY_S = 2.0
GROWTH_KIB = 32 << 10  # what a process may grow by once a quarter of its life is over
WIDTH = 256
LOGGED = re.compile(r"^.*\bstatus=(\d{3})\b", re.MULTILINE)


@dataclass
class Callers:
    """Callers that run side by side, and what they saw, by status or by the reason why there is none."""

    port: int
    questions: "list[list[Question]]"  # of each caller
    end_s: float
    interval_s: float  # of each caller; 0: as soon as it is answered
    checked_share: float = 0.05  # of the answers
    counts: "collections.Counter[str]" = field(default_factory=collections.Counter)
    asked: "collections.Counter[int]" = field(default_factory=collections.Counter)  # by each caller
    slowest_s: float = 0.0

    def __post_init__(self) -> None:
        self._counting = threading.Lock()
        self._threads = [threading.Thread(target=self._call, args=(index,)) for index in range(len(self.questions))]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _count(self, outcome: str) -> None:
        """Count one; threads that add to one count at the same time can lose some."""
        with self._counting:
            self.counts[outcome] += 1

    def _call(self, seed: int) -> None:
        """Send one request each interval over a connection that is kept."""
        draw = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        due_s = time.monotonic() + draw.random() * self.interval_s
        while due_s < self.end_s:
            time.sleep(max(0.0, due_s - time.monotonic()))
            due_s = due_s + self.interval_s if self.interval_s else time.monotonic()
            question = draw.choice(self.questions[seed])
            self.asked[seed] += 1
            began_s = time.monotonic()
            try:
                connection.request("POST", "/predict", question.body, {"content-type": "application/json"})
                reply = connection.getresponse()
                data = reply.read()
            except ConnectionRefusedError:  # between two servers
                self._count("refused")
                connection.close()
                time.sleep(0.05)
                continue
            except ConnectionError:  # an ending server closed it while it was idle, or before it was accepted
                self._count("closed")
                connection.close()
                continue
            self._count(str(reply.status))
            self.slowest_s = max(self.slowest_s, time.monotonic() - began_s)
            if reply.status != question.status and reply.status != 503:
                self._count("wrong status")
            elif (
                reply.status == 200
                and draw.random() < self.checked_share
                and not agree(json.loads(data)["outputs"], question.expected)
            ):
                self._count("wrong")
        connection.close()


@dataclass(frozen=True)
class Question:
    """A request, and what `eager` answered to it before there was any load."""

    body: bytes
    status: int
    expected: list[list[float]]  # none where the status is not 200


def asked_eager(port: int) -> list[list[Question]]:
    """Ask each caller's questions one after the other, and keep the answers as what is right."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    questions = []
    for seed in range(CALLERS):
        draw = random.Random(seed)
        questions.append([asked(connection, made_body(draw)) for _ in range(QUESTIONS)])
    connection.close()
    return questions


def asked(connection: http.client.HTTPConnection, body: bytes) -> Question:
    connection.request("POST", "/predict/eager", body, {"content-type": "application/json"})
    reply = connection.getresponse()
    document = json.loads(reply.read())
    width = {len(row) for row in json.loads(body)["inputs"]}
    if reply.status != (200 if width == {WIDTH} else 400):
        raise RuntimeError(f"expected an answer from eager before the load, got {reply.status}: {document}")
    return Question(body, reply.status, document.get("outputs", []))


def made_body(draw: random.Random) -> bytes:
    width = WIDTH if draw.random() > 0.05 else WIDTH - 1
    rows = [[round(draw.uniform(-4, 4), 2) for _ in range(width)] for _ in range(draw.choice((1, 3, 8)))]
    return json.dumps({"inputs": rows}).encode()


def agree(outputs: list[list[float]], expected: list[list[float]]) -> bool:
    """Whether two answers to the same question are the same, whatever backend and batch they came from."""
    return [len(row) for row in outputs] == [len(row) for row in expected] and all(
        abs(a - b) <= 1e-3 * max(1.0, abs(b))
        for row, other in zip(outputs, expected, strict=True)
        for a, b in zip(row, other, strict=True)
    )


class Memory:
    """What each process holds, over its time."""

    def __init__(self) -> None:
        self.samples: dict[str, list[tuple[float, int]]] = collections.defaultdict(list)
        self._start_s = time.monotonic()

    def sample(self, server: RunningServer) -> None:
        """Look at every process of a server, unless some worker is still loading, and growing for that."""
        if not server.answers("/v2/health/ready", 200):
            return
        at_s = round(time.monotonic() - self._start_s, 1)
        for pid in descendants(server.process.pid):
            name, held = title(pid).removeprefix(TITLE), resident_kib(pid)
            if name in ("worker", "http") and held:
                self.samples[f"{name} {pid}"].append((at_s, held))

    def growth(self) -> dict[str, int]:
        """How much each process has grown since a quarter of its life, in KiB."""
        found = {}
        for name, samples in self.samples.items():
            late = samples[len(samples) // 4 :]
            found[name] = late[-1][1] - late[0][1]
        return found


class Lives:
    """The server, which is reloaded now and then: one life after the other, on one port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._model = write_made_model(directory, "soak", dim=WIDTH, hidden=1024, depth=4)
        self._port = free_port()
        self.logs: list[Path] = []
        self.kills = 0  # in this life
        self.ended: list[dict[str, int]] = []
        self.server = self._start()

    def _start(self) -> RunningServer:
        self.logs.append(self._directory / f"log-{len(self.logs)}")
        flags = ("--model", str(self._model), "--backends", "eager,fused", "--log-requests")
        shape = ("--api-servers", "2", "--workers", "2", "--port", str(self._port))
        return RunningServer(self.logs[-1], *flags, *shape).wait_ready()

    def kill_a_worker(self) -> None:
        """Kill one that is ready, so that each kill is one restart."""
        self.wait_whole()
        os.kill(random.choice(self.server.pids_of("worker")), signal.SIGKILL)
        self.kills += 1

    def wait_whole(self) -> None:
        """Wait until every worker that was killed is replaced and warm."""
        self.server.wait_until(lambda: self.server.metric("mlp_worker_restarts_total") == self.kills)
        self.server.wait_until(lambda: self.server.answers("/v2/health/ready", 200))

    def end(self) -> None:
        """End the server in order, and note how that went."""
        self.wait_whole()
        restarts = int(self.server.metric("mlp_worker_restarts_total"))
        status = self.server.stop()
        self.ended.append({"kills": self.kills, "worker_restarts": restarts, "exit_status": status})
        self.kills = 0

    def reload(self) -> None:
        """End the server and start it anew."""
        self.end()
        self.server = self._start()

    def counted(self) -> dict[str, int]:
        """What all servers together have logged, by status."""
        counts: collections.Counter[str] = collections.Counter()
        for log in self.logs:
            counts.update(LOGGED.findall(log.read_text(errors="replace")))
        return dict(counts)


def measured_capacity(port: int, questions: list[list[Question]]) -> float:
    """Return how many requests a second are answered when the next is sent as soon as the last is answered."""
    callers = Callers(port, questions, time.monotonic() + MEASURE_S, 0.0)
    callers.join()
    return (callers.counts["200"] + callers.counts["400"]) / MEASURE_S


def soak(
    lives: Lives,
    questions: list[list[Question]],
    seconds: float,
    rate: float,
    is_enough: Callable[["collections.Counter[str]", Callers], bool] = lambda _done, _callers: False,
) -> dict[str, Any]:
    """Load and disturb; return what callers and servers counted, and what each process held.

    It ends after `seconds`, or before, once the disturbances that are done and what was asked are enough.
    """
    before = lives.counted()
    memory, start_s = Memory(), time.monotonic()
    callers = Callers(lives.server.port, questions, start_s + seconds, CALLERS / rate)
    due = {"kill": KILL_EVERY_S, "switch": SWITCH_EVERY_S, "reload": RELOAD_EVERY_S, "sample": 0.0}
    done: collections.Counter[str] = collections.Counter()
    while time.monotonic() < callers.end_s:
        what = min(due, key=lambda name: due[name])
        time.sleep(max(0.0, min(start_s + due[what], callers.end_s) - time.monotonic()))
        if time.monotonic() >= callers.end_s:
            break
        match what:
            case "kill":
                lives.kill_a_worker()
            case "reload":
                lives.reload()
            case "switch":
                put_default(lives.server.port, ("eager", "fused", "auto")[done["switch"] % 3])
            case _:
                memory.sample(lives.server)
        done[what] += 1
        every_s = {"kill": KILL_EVERY_S, "reload": RELOAD_EVERY_S, "switch": SWITCH_EVERY_S, "sample": SAMPLE_EVERY_S}
        due[what] = max(due[what] + every_s[what], time.monotonic() - start_s)
        if is_enough(done, callers):
            callers.end_s = time.monotonic()
    callers.join()
    server = lives.server
    server.wait_until(lambda: server.metric("mlp_inflight_requests") == 0)
    scraped = {str(status): int(server.metric("mlp_requests_total", status=str(status))) for status in (200, 400, 503)}
    last = collections.Counter(LOGGED.findall(lives.logs[-1].read_text(errors="replace")))
    lives.end()
    return {
        "seconds": seconds,
        "requests_per_s": rate,
        "disturbances": {what: done[what] for what in due},
        "callers_counted": dict(callers.counts),
        "servers_logged": {name: count - before.get(name, 0) for name, count in lives.counted().items()},
        "last_server_scraped": scraped,
        "last_server_logged": dict(last),
        "lives": lives.ended,
        "slowest_s": callers.slowest_s,
        "growth_kib": memory.growth(),
        "memory_kib": dict(memory.samples),
    }


def put_default(port: int, backend: str) -> None:
    """Switch the default backend."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("PUT", "/backend", json.dumps({"default": backend}), {"content-type": "application/json"})
    connection.getresponse().read()
    connection.close()


def judge(report: dict[str, Any]) -> list[str]:
    """Say what a service owner would not accept."""
    problems = []
    pairs = (("callers_counted", "servers_logged"), ("last_server_scraped", "last_server_logged"))
    for one, other in pairs:
        for status in sorted({*report[one], *report[other]}):
            a, b = report[one].get(status, 0), report[other].get(status, 0)
            if status.isdigit() and a != b:
                problems.append(f"status {status}: {a} {one}, {b} {other}")
    unexpected = set(report["callers_counted"]) - {"200", "400", "503", "refused", "closed"}
    if unexpected:
        problems.append(f"unexpected outcomes: {sorted(unexpected)}")
    closed, most = report["callers_counted"].get("closed", 0), 2 * CALLERS * report["disturbances"].get("reload", 0)
    if closed > most:
        problems.append(f"{closed} requests found their connection closed, more than {most}, two a caller and reload")
    problems += [
        f"a server's life was not as it should be: {life}"
        for life in report["lives"]
        if life["exit_status"] != 0 or life["kills"] != life["worker_restarts"]
    ]
    problems += [f"{name} grew by {grown} KiB" for name, grown in report["growth_kib"].items() if grown > GROWTH_KIB]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to load")
    parser.add_argument(
        "--rate", type=float, help="requests a second, all callers together; left out: 70%% of capacity"
    )
    parser.add_argument("--json", type=Path, help="file to write what was seen to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        lives = Lives(Path(name))
        try:
            questions = asked_eager(lives.server.port)
            capacity = None if options.rate else measured_capacity(lives.server.port, questions)
            report = soak(lives, questions, options.seconds, options.rate or SHARE * (capacity or 0.0))
        finally:
            lives.server.end()
    report = {"capacity_per_s": capacity, **report, "conditions": conditions()}
    report["problems"] = problems = judge(report)
    print(json.dumps({name: value for name, value in report.items() if name != "memory_kib"}, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
