"""Load with kills: `PYTHONPATH=. python tests/service/chaos/soak.py --seconds 600 --json FILE`.

Callers send at a steady rate while a worker is killed every few seconds and the default backend is switched. At the end
the callers' counts and the server's agree to the request, every request has had an answer, and no process has grown.
"""

import argparse
import collections
import http.client
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.service.running_server import RunningServer, descendants, title

CALLERS = 8
KILL_EVERY_S = 15.0
SWITCH_EVERY_S = 3.0
GROWTH_KIB = 32 << 10  # what a process may grow by between a quarter of the time and its end
WIDTH = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to load")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second, all callers together")
    parser.add_argument("--json", type=Path, help="file to write what was seen to")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        flags = ("--backends", "eager,fused", "--api-servers", "2", "--workers", "2", "--cache-dir", directory)
        server = RunningServer(Path(directory) / "log", *flags).wait_ready()
        try:
            report = soak(server, options.seconds, options.rate)
            report["exit_status"] = server.stop()
        finally:
            server.end()
    problems = judge(report)
    report["problems"] = problems
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 1 if problems else 0


def soak(server: RunningServer, seconds: float, rate: float) -> dict[str, object]:
    """Load a server and disturb it; return what callers and server counted, and what each process held."""
    end = time.monotonic() + seconds
    counts: collections.Counter[str] = collections.Counter()
    slowest_s = [0.0]
    callers = [
        threading.Thread(target=call, args=(server.port, end, CALLERS / rate, counts, slowest_s, index))
        for index in range(CALLERS)
    ]
    for caller in callers:
        caller.start()
    start, kills, switches = time.monotonic(), 0, 0
    early: dict[str, int] = {}
    while time.monotonic() < end:
        time.sleep(min(SWITCH_EVERY_S, max(0.0, end - time.monotonic())))
        put_default(server.port, ("eager", "fused", "auto")[switches % 3])
        switches += 1
        if not early and time.monotonic() - start > seconds / 4:
            early = memory_kib(server)
        if (time.monotonic() - start) / KILL_EVERY_S > kills + 1:
            workers = [pid for pid in descendants(server.process.pid) if title(pid) == "fused-mlp-server: worker"]
            if workers:
                os.kill(random.choice(workers), signal.SIGKILL)
                kills += 1
    for caller in callers:
        caller.join()
    server.wait_until(lambda: server.metric("mlp_inflight_requests") == 0)
    server.wait_until(lambda: server.metric("mlp_worker_restarts_total") == kills)
    counted = {
        str(status): server.metric("mlp_requests_total", status=str(status)) for status in (200, 400, 429, 503, 504)
    }
    return {
        "seconds": seconds,
        "requests_per_s": rate,
        "kills": kills,
        "switches": switches,
        "callers_counted": dict(counts),
        "server_counted": counted,
        "worker_restarts": server.metric("mlp_worker_restarts_total"),
        "slowest_s": slowest_s[0],
        "memory_kib_early": early,
        "memory_kib_late": memory_kib(server),
    }


def call(
    port: int, end: float, interval_s: float, counts: "collections.Counter[str]", slowest_s: list[float], seed: int
) -> None:
    """Send one request each interval over a connection that is kept, and count the answers by status."""
    draw = random.Random(seed)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    due = time.monotonic() + draw.random() * interval_s
    while due < end:
        time.sleep(max(0.0, due - time.monotonic()))
        due += interval_s
        width = WIDTH if draw.random() > 0.05 else WIDTH - 1
        body = json.dumps({"inputs": [[draw.random() for _ in range(width)] for _ in range(draw.choice((1, 3, 20)))]})
        began = time.monotonic()
        try:
            connection.request("POST", "/predict", body, {"content-type": "application/json"})
            reply = connection.getresponse()
            reply.read()
            counts[str(reply.status)] += 1
        except OSError as error:
            counts[type(error).__name__] += 1
            connection.close()
        slowest_s[0] = max(slowest_s[0], time.monotonic() - began)
    connection.close()


def put_default(port: int, backend: str) -> None:
    """Switch the default backend; one that is not ready at this moment may be refused."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("PUT", "/backend", json.dumps({"default": backend}), {"content-type": "application/json"})
    connection.getresponse().read()
    connection.close()


def memory_kib(server: RunningServer) -> dict[str, int]:
    """Return the largest resident memory of each kind of process, in KiB."""
    found: dict[str, int] = {}
    for pid in descendants(server.process.pid):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        held = next((int(line.split()[1]) for line in lines if line.startswith("VmRSS")), 0)
        found[title(pid)] = max(found.get(title(pid), 0), held)
    return {name: held for name, held in found.items() if name.startswith("fused-mlp-server")}


def judge(report: dict[str, object]) -> list[str]:
    """Say what a service owner would not accept."""
    callers, counted = report["callers_counted"], report["server_counted"]
    early, late = report["memory_kib_early"], report["memory_kib_late"]
    assert isinstance(callers, dict)
    assert isinstance(counted, dict)
    assert isinstance(early, dict)
    assert isinstance(late, dict)
    problems = [f"{count} requests ended with {name}" for name, count in callers.items() if not name.isdigit()]
    problems += [
        f"status {status}: callers counted {callers.get(status, 0)}, the server {counted.get(status, 0)}"
        for status in sorted({*callers, *counted})
        if status.isdigit() and callers.get(status, 0) != counted.get(status, 0)
    ]
    if set(callers) - {"200", "400", "503"}:
        problems.append(f"unexpected outcomes: {callers}")
    if report["worker_restarts"] != report["kills"]:
        problems.append(f"{report['kills']} workers were killed and {report['worker_restarts']} started anew")
    for name, before in early.items():
        if late.get(name, 0) > before + GROWTH_KIB:
            problems.append(f"{name} grew from {before} to {late[name]} KiB")
    if report["exit_status"] != 0:
        problems.append(f"the server ended with {report['exit_status']}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
