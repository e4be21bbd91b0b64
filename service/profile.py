"""Measures where a request's processor time goes in the server's own code: `python -m service.profile --json FILE`.

The real parts of the HTTP process and of the worker are driven in one process, 32 requests per turn, and each part is
timed where it is called. The cost of the callers' sockets, a read and a write per request, is left out; the worker's
socket, used once per turn, is included. The model is the demo model, so that the engine's share shows as well. Settings
are the defaults, whatever the environment says, except that nothing is polled for: in one process nobody sends
meanwhile.

`total` is the sum of the parts; `turn` is the whole turn seen from outside, including the driving itself.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import uvicorn
from uvicorn.server import ServerState

from models.conditions import conditions
from models.config import ModelConfig
from models.directory import resolve
from models.engine import BackendStatus, Engine, load_engine
from models.errors import ConfigError
from service.dispatch import Dispatcher
from service.inference import Inference, InferenceOptions
from service.link import WorkerLink
from service.metrics import Metrics
from service.openinference import LENGTH_HEADER
from service.protocol import Protocol, protocol
from service.settings import Settings
from service.shared_state import SharedState
from service.wire import Kind, header
from service.worker import WorkerServer

SETTINGS = Settings.model_construct(spin_us=0)  # reads no environment
RECORDED = ("model", "timeout_s", "spin_us", "hold_share")
DEVICE = "cpu"
CONNECTIONS = 32
ROUNDS = 15
TURNS = 40  # a round
WARM_UP_TURNS = 40
BACKEND = "fused"
WIRES = ("binary", "json")
STAGES = {
    "parse": "the body: JSON, shapes, rows",
    "submit": "admission, the frame to the worker",
    "receive": "the rest of the way in: bytes, HTTP head, exchange",
    "worker": "the worker's own work: frames, queue, batch, results",
    "engine": "the model",
    "result": "the frame from the worker, metrics",
    "encode": "the reply's body",
    "transport": "the reply's head, the next request's turn",
}


class NullTransport:
    """Takes writes and keeps them; what asyncio's transports do without a socket."""

    def __init__(self) -> None:
        self.written: list[bytes | memoryview] = []

    def write(self, data: bytes) -> None:
        """Keep the bytes."""
        self.written.append(data)

    def writelines(self, parts: list[bytes | memoryview]) -> None:
        """Keep the parts."""
        self.written.extend(parts)

    def take(self) -> bytes:
        """Return what was written since the last time."""
        data = b"".join(self.written)
        self.written.clear()
        return data

    def is_closing(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing."""

    def get_write_buffer_size(self) -> int:
        """Return 0."""
        return 0

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        """Know nothing of a peer."""
        return default


class Clock:
    """Adds up the time spent in each part, without that of the parts that it calls."""

    def __init__(self, now_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self.now_ns = now_ns
        self.spent_ns: defaultdict[str, int] = defaultdict(int)
        self._inner_ns = [0]

    def time(self, owner: Any, method: str, stage: str) -> None:
        """Time a method of one object or class from now on."""
        call: Callable[..., Any] = getattr(owner, method)
        inner, spent = self._inner_ns, self.spent_ns

        def timed(*args: Any, **kwargs: Any) -> Any:
            inner.append(0)
            start = self.now_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = self.now_ns() - start
                spent[stage] += took - inner.pop()
                inner[-1] += took

        setattr(owner, method, timed)


def request_bytes(wire: str, config: ModelConfig) -> bytes:
    """Return the bytes of one usual request of one row."""
    row = np.arange(config.width_in, dtype="<f4") % 17
    if wire == "json":
        body = json.dumps({"inputs": [row.tolist()]}).encode()
        head = b"POST /predict HTTP/1.1\r\nhost: localhost:8000\r\ncontent-type: application/json\r\n"
    else:
        sizes = {"binary_data_size": row.nbytes}
        tensor = {"name": "input", "shape": [1, config.width_in], "datatype": "FP32", "parameters": sizes}
        part = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        body = part + row.tobytes()
        head = b"POST /v2/models/%b/infer HTTP/1.1\r\nhost: localhost:8000\r\n%b: %d\r\n" % (
            config.name.encode(),
            LENGTH_HEADER,
            len(part),
        )
    return b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


async def measure(
    wire: str, engine: Engine, config: ModelConfig, now_ns: Callable[[], int] = time.perf_counter_ns
) -> list[dict[str, float]]:
    """Return each round's microseconds a request by stage, and those of its whole turns as seen from outside."""
    backends = (BACKEND,)
    settings = SETTINGS
    metrics = Metrics(backends, 1)
    sockets = [Path("worker-0.sock")]
    state = SharedState(1, len(backends))
    dispatcher = Dispatcher(sockets, backends, state, settings.admission(DEVICE), settings.timeout_s, metrics)
    body_bytes = settings.body_bytes(config.width_in)
    options = InferenceOptions(config.name, config.width_in, config.labels, settings.request_rows, body_bytes, None)
    inference = Inference(dispatcher, options, metrics)
    clock = Clock(now_ns)
    link, to_worker = connected(dispatcher, engine.backends)
    for operation in inference.targets.values():
        clock.time(operation, "parse", "parse")
        clock.time(operation, "encode", "encode")
    clock.time(dispatcher, "submit", "submit")
    near, far = socket.socketpair()
    for end in (near, far):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    listener = socket.socket(socket.AF_UNIX)
    bounds = (settings.batch_rows(DEVICE), b"{}", settings.spin_us, settings.hold_share)
    worker = WorkerServer(listener, engine.run, backends, *bounds)
    clock.time(worker, "_run", "engine")
    worker.listener.adopt(near)
    kind = protocol(inference, settings)
    clock.time(kind, "write_reply", "transport")
    connections = [connection(kind) for _ in range(CONNECTIONS)]
    far.recv(1 << 16)  # the worker's greeting
    request = request_bytes(wire, config)

    async def turn() -> None:
        for each, _ in connections:
            each.data_received(request)
        await asyncio.sleep(0)  # the link's flush
        far.sendall(to_worker.take())
        worker.turn()
        link.data_received(far.recv(1 << 20))
        for _, transport in connections:
            reply = transport.take()
            if not reply.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"expected a reply with status 200, got {reply[:200]!r}")

    clock.time(kind, "data_received", "receive")
    clock.time(worker, "turn", "worker")
    clock.time(link, "data_received", "result")
    rounds = []
    for index in range(WARM_UP_TURNS + ROUNDS * TURNS):
        if index >= WARM_UP_TURNS and (index - WARM_UP_TURNS) % TURNS == 0:
            clock.spent_ns.clear()
        start_ns = clock.now_ns()
        await turn()
        clock.spent_ns["turn"] += clock.now_ns() - start_ns
        if index >= WARM_UP_TURNS and (index - WARM_UP_TURNS) % TURNS == TURNS - 1:
            rounds.append({stage: clock.spent_ns[stage] / 1e3 / TURNS / CONNECTIONS for stage in (*STAGES, "turn")})
    worker.listener.close()
    for end in (near, far, listener):
        end.close()
    for each, _ in connections:
        each.connection_lost(None)
    return rounds


def connected(dispatcher: Dispatcher, statuses: Mapping[str, BackendStatus]) -> tuple[WorkerLink, NullTransport]:
    """Give the dispatcher a worker that is up, and return what it would send to it."""
    link = dispatcher.pool.link(0)
    transport = NullTransport()
    link.connection_made(cast("asyncio.BaseTransport", transport))
    hello = orjson.dumps({"backends": {name: asdict(status) for name, status in statuses.items()}})
    link.data_received(header(Kind.HELLO, 0, len(hello)) + hello)
    return link, transport


def connection(kind: type[Protocol]) -> tuple[Protocol, NullTransport]:
    """Return one HTTP connection."""
    config = uvicorn.Config(nothing, http=kind, log_config=None)
    config.load()
    each = kind(config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
    transport = NullTransport()
    each.connection_made(cast("asyncio.Transport", transport))
    return each, transport


async def nothing(_scope: object, _receive: object, _send: object) -> None:
    """Stand in for the app, which usual requests do not reach."""


def main(arguments: list[str]) -> int:
    """Measure, print a table, and write the file asked for; return 0, or 2 with a line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m service.profile", description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the result to")
    chosen = parser.parse_args(arguments)
    if chosen.json and not chosen.json.parent.is_dir():
        print(f"error: --json {chosen.json}: there is no directory {chosen.json.parent}", file=sys.stderr)
        return 2
    try:
        document = profile()
        if chosen.json:
            chosen.json.write_text(json.dumps(document, indent=2) + "\n")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'us a request':14}" + "".join(f"{wire:>22}" for wire in WIRES))
    for stage, what in [*STAGES.items(), ("total", ""), ("turn", "from outside")]:
        cells = [document["wires"][wire][stage] for wire in WIRES]
        shown = "".join(f"{cell['median']:8.2f} ({cell['min']:.2f}-{cell['max']:.2f})".rjust(22) for cell in cells)
        print(f"{stage:14}{shown}  {what}")
    return 0


def profile() -> dict[str, Any]:
    """Measure both wires and return medians and extremes over the rounds, with what they were measured on."""
    import torch

    directory = resolve(SETTINGS.model)
    config = ModelConfig.load(directory)
    engine = load_engine(directory, backends=(BACKEND,))
    engine.warm_up(CONNECTIONS)
    wires: dict[str, Any] = {}
    for wire in WIRES:
        rounds = asyncio.run(measure(wire, engine, config))
        for each in rounds:
            each["total"] = sum(each[stage] for stage in STAGES)
        wires[wire] = {
            stage: {
                "median": round(statistics.median(each[stage] for each in rounds), 3),
                "min": round(min(each[stage] for each in rounds), 3),
                "max": round(max(each[stage] for each in rounds), 3),
            }
            for stage in (*STAGES, "total", "turn")
        }
    facts = conditions(torch.device(DEVICE), torch.float32, torch.get_num_threads())
    return {
        "unit": "us a request",
        "requests_a_turn": CONNECTIONS,
        "rounds": ROUNDS,
        "backend": BACKEND,
        "implementation": engine.backends[BACKEND].implementation,
        "settings": {
            **SETTINGS.model_dump(mode="json", include=set(RECORDED)),
            "max_batch_rows": SETTINGS.batch_rows(DEVICE),
        },
        "wires": wires,
        "conditions": facts,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
