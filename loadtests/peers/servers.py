"""The servers that are compared: how each is started, what is sent to it, and how its replies are read."""

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from loadtests.conditions import ROOT, installed
from loadtests.errors import LoadTestError
from loadtests.inference import ReplyError, inference, outputs_of

Rows = NDArray[np.float32]

OURS = "ours"
BACKEND = "fused"
PEERS_PYTHON = ROOT / ".peers/bin/python"
# Of the largest output. Two orders of summing float32 differ by 1e-6; another request's rows differ by 1.
TOLERANCE = 1e-3
CHECK_LIMIT_S = 20.0
# How long OpenMP's threads spin for each other, as this server sets it. At libgomp's default the peers' models would
# take many times longer wherever a front or the load wants a core, and that is not what is compared.
SPIN_COUNT = 2000


class PeerError(LoadTestError):
    """A server that cannot be run, or answers wrongly."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows and their expected outputs."""

    model: str  # as its config names it
    inputs: Rows
    outputs: Rows

    def require(self, outputs: Rows) -> None:
        """Compare.

        Raises:
            PeerError: other outputs than the expected ones.
        """
        if outputs.shape != self.outputs.shape:
            raise PeerError(f"expected outputs of shape {self.outputs.shape}, got {outputs.shape}")
        error = float(np.abs(outputs - self.outputs).max())
        if not error <= TOLERANCE * float(np.abs(self.outputs).max()):
            raise PeerError(f"a wrong answer: outputs are off by up to {error:.3g}")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, and how its reply is read."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    read: Callable[[Mapping[str, str], bytes], Rows]
    sample: Sample

    def check(self, port: int) -> None:
        """Send the request over a connection of its own, and compare the reply with what is expected.

        Raises:
            PeerError: another status than 200, or another answer.
            OSError, http.client.HTTPException: no reply.
        """
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=CHECK_LIMIT_S)) as connection:
            connection.request("POST", self.path, self.body, dict(self.headers))
            reply = connection.getresponse()
            body = reply.read()
            if reply.status != 200:
                raise StatusError(f"expected status 200, got {reply.status}: {body[:200]!r}")
            try:
                outputs = self.read(cast("Mapping[str, str]", reply.headers), body)
            except (ReplyError, ValueError, KeyError, TypeError) as error:
                raise PeerError(f"a reply that cannot be read: {error}") from error
        self.sample.require(outputs)


class StatusError(PeerError):
    """A status other than 200."""


@dataclass(frozen=True, slots=True)
class Server:
    """One of the servers."""

    title: str
    package: str  # whose version is told
    python: str
    module: str
    wires: tuple[str, ...] = ("json", "binary")
    environment: Mapping[str, str] | None = None

    @property
    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        if self.python == sys.executable or PEERS_PYTHON.exists():
            return None
        return "its package is not installed; `make .peers/stamp` installs it"

    def version(self) -> str:
        """Return the version of its package, or `none`."""
        if self.python == sys.executable:
            return installed(self.package)
        if self.missing:
            return "none"
        code = f"from importlib.metadata import version; print(version({self.package!r}))"
        done = subprocess.run([self.python, "-c", code], capture_output=True, text=True, check=False)
        return done.stdout.strip() or "none"

    def command(self, model: str, rows: int, port: int) -> list[str]:
        """Return the command that starts it; this project's server gets a queue of 1024 requests, as mosec has."""
        command = [self.python, "-m", self.module]
        if self.module == "service":
            command += ["--model", model, "--backends", BACKEND, "--default-backend", BACKEND, "--workers", "1"]
            command += ["--threads", str(threads()), "--max-queue-rows", str(1024 * rows), "--port", str(port)]
        return command

    def environ(self, model: str, wire: str, rows: int, port: int) -> dict[str, str]:
        """Return the environment variables that tell it what to serve."""
        told = {"model": model, "backend": BACKEND, "wire": wire, "port": port, "threads": threads(), "rows": rows}
        variables = {f"PEER_{name.upper()}": str(value) for name, value in told.items()}
        variables |= {"OMP_NUM_THREADS": str(threads()), "GOMP_SPINCOUNT": str(SPIN_COUNT)}
        return variables | {name: value.format(port=port) for name, value in (self.environment or {}).items()}

    def exchange(self, wire: str, sample: Sample) -> Exchange:
        """Return the request for a sample."""
        if self.module == "service":
            sent = inference(wire, sample.model, sample.inputs, sample.outputs.shape[1], None)
            return Exchange(sent.path, sent.headers, sent.body, lambda head, body: outputs_of(sent, head, body), sample)
        if wire == "json":
            body = json.dumps({"inputs": sample.inputs.tolist()}).encode()
            return Exchange("/predict", {"content-type": "application/json"}, body, json_outputs, sample)

        def read(_: Mapping[str, str], body: bytes) -> Rows:
            return np.frombuffer(body, "<f4").reshape(sample.outputs.shape)

        body = sample.inputs.astype("<f4").tobytes()
        return Exchange("/predict", {"content-type": "application/octet-stream"}, body, read, sample)


def json_outputs(_: Mapping[str, str], body: bytes) -> Rows:
    """Read a JSON reply: an object's `outputs`, or the bare array."""
    document: Any = json.loads(body)
    return np.asarray(document["outputs"] if isinstance(document, dict) else document, np.float32)


def threads() -> int:
    """Return the threads that every server computes with: one worker, all cores."""
    return len(os.sched_getaffinity(0))


SERVERS: dict[str, Server] = {
    OURS: Server("this server", "litserve", sys.executable, "service"),
    "litserve": Server("stock LitServe", "litserve", sys.executable, "loadtests.peers.programs.litserve_stock"),
    "fastapi": Server("FastAPI in process", "fastapi", sys.executable, "loadtests.peers.programs.fastapi_in_process"),
    "bentoml": Server(
        "BentoML",
        "bentoml",
        str(PEERS_PYTHON),
        "loadtests.peers.programs.bentoml_service",
        wires=("json",),
        environment={"BENTOML_HOME": str(ROOT / ".peers/bentoml"), "BENTOML_DO_NOT_TRACK": "1"},
    ),
    "ray": Server("Ray Serve", "ray", str(PEERS_PYTHON), "loadtests.peers.programs.ray_serve"),
    "mosec": Server(
        "mosec",
        "mosec",
        str(PEERS_PYTHON),
        "loadtests.peers.programs.mosec_server",
        environment={"MOSEC_PORT": "{port}", "MOSEC_ADDRESS": "127.0.0.1", "MOSEC_LOG_LEVEL": "warning"},
    ),
}


def samples(model: str, rows: int) -> tuple[Sample, Sample]:
    """Return what to load a server with, and what to check it with, by `loadtests/peers/programs/expected.py`.

    Raises:
        PeerError: there is no such model.
    """
    command = [sys.executable, "-m", "loadtests.peers.programs.expected", model, str(rows)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"what makes its rows ended with {done.returncode}"]
        raise PeerError(f"--models {model}: {last[0]}")
    told = json.loads(done.stdout)
    loaded, checked = (
        Sample(told["model"], np.asarray(each["inputs"], np.float32), np.asarray(each["outputs"], np.float32))
        for each in told["sets"]
    )
    return loaded, checked
