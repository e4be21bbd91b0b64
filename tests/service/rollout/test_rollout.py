"""A kernel that goes wrong under load: who is answered what, and what the server says of it."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.service.running_server import PlantedServer

pytestmark = pytest.mark.slow  # real servers

ROWS = [[float((value * 7 + row) % 17) for value in range(64)] for row in range(2)]
CALLERS = ("/predict", "/predict", "/predict", "/predict/fused")
CALLS_A_CONNECTION = 10  # so that both HTTP processes answer each caller


class Call(NamedTuple):
    """A request and what came of it."""

    path: str
    sent_ns: int
    status: int
    backend: str | None
    is_right: bool
    error: str


class Load:
    """Callers side by side, who write down what they are answered."""

    def __init__(self, server: PlantedServer) -> None:
        self._server = server
        self._expected = server.post("/predict/eager", json={"inputs": ROWS}).json()["outputs"]
        self._is_over = False
        self.calls: list[Call] = []

    def _call(self, path: str) -> None:
        while not self._is_over:
            with httpx.Client(base_url=self._server.url, timeout=60) as client:
                for _ in range(CALLS_A_CONNECTION):
                    sent_ns = time.monotonic_ns()
                    reply = client.post(path, json={"inputs": ROWS})
                    document = reply.json()
                    is_right = reply.status_code == 200 and all(
                        got == pytest.approx(expected, rel=1e-3, abs=1e-3)
                        for got, expected in zip(document["outputs"], self._expected, strict=True)
                    )
                    backend = reply.headers.get("x-backend")
                    call = Call(path, sent_ns, reply.status_code, backend, is_right, document.get("error", ""))
                    self.calls.append(call)

    def wait_for(self, count: int) -> int:
        """Return the time, once each caller has been answered so often from now on."""
        now_ns = time.monotonic_ns()
        self._server.wait_until(
            lambda: all(sum(call.path == path for call in self.since(now_ns)) >= count for path in CALLERS)
        )
        return now_ns

    def since(self, start_ns: int) -> list[Call]:
        """What was sent after that time and has been answered."""
        return [call for call in list(self.calls) if call.sent_ns > start_ns]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._call, args=(path,)) for path in CALLERS]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over = True
            for thread in threads:
                thread.join()


@pytest.fixture(scope="module")
def planted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlantedServer]:
    server = PlantedServer(
        tmp_path_factory.mktemp("planted"),
        *("--backends", "eager,fused", "--api-servers", "2"),
        *("--shadow-rate", "0.2", "--max-drift", "0.02", "--canary", "eager=0.1"),
    )
    try:
        server.wait_ready()
        yield server
    finally:
        server.end()


@pytest.fixture
def server(planted_server: PlantedServer) -> Iterator[PlantedServer]:
    """The server with fused in its place, whatever the test before has left."""
    yield planted_server
    planted_server.plant("")
    for default in ("fused", "auto"):
        assert planted_server.put_back(default).status_code == 200
    assert planted_server.state()["state"] == "ready"


@pytest.mark.parametrize("default", ["auto", "fused"])
@pytest.mark.parametrize("fault", ["drift", "non_finite", "fault"])
def test_no_reply_is_wrong_once_it_is_detected_and_no_caller_who_names_no_backend_fails(
    server: PlantedServer, fault: str, default: str
) -> None:
    assert server.put("/backend", json={"default": default}).status_code == 200
    before, load, logged = server.fallbacks(fault), Load(server), server.output.count("backend fused is taken out")
    with load.running():
        load.wait_for(20)
        server.wait_until(lambda: {call.backend for call in list(load.calls)} >= {"eager", "fused"})  # canary, default
        assert all(call.is_right for call in load.calls)
        server.plant(fault)
        server.wait_until(lambda: server.state()["state"] == "unavailable")
        detected_ns = load.wait_for(20)
    unnamed = [call for call in load.calls if call.path == "/predict"]
    assert {call.status for call in unnamed} == {200}
    assert all(call.is_right for call in unnamed) or fault == "drift"
    later = load.since(detected_ns)
    assert {(call.backend, call.is_right) for call in later if call.path == "/predict"} == {("eager", True)}
    named = [call for call in later if call.path == "/predict/fused"]
    assert {call.status for call in named} == {503}
    told = {"drift": "0.5 of the row's largest output", "non_finite": "held NaN", "fault": "illegal memory access"}
    assert all(told[fault] in call.error and "taken out at 20" in call.error for call in named)

    state = server.state()
    assert told[fault] in state["reason"]
    assert state["taken_out_at"][:2] == "20"
    assert server.fallbacks(fault) == before + 1
    assert server.output.count("backend fused is taken out") == logged + 1
    document = server.get("/backend").json()
    assert (document["default"], document["is_auto"]) == ("eager", default == "auto")

    server.plant("")
    assert server.put_back().json()["default"] == "fused"
    for _ in range(8):  # a connection each, so that both HTTP processes answer some
        assert server.post("/predict/fused", json={"inputs": ROWS}).headers["x-backend"] == "fused"
    assert "backend fused is put back" in server.output


def test_a_backend_that_is_put_back_and_still_wrong_is_taken_out_again(server: PlantedServer) -> None:
    server.plant("drift")
    for _ in range(2):
        assert server.put_back().status_code == 200
        before = server.fallbacks("drift")
        load = Load(server)
        with load.running():
            server.wait_until(lambda before=before: server.fallbacks("drift") == before + 1)  # type: ignore[misc]
    assert server.metric("mlp_shadow_drift_count", backend="fused") > 0
    assert server.metric("mlp_shadow_drift_count", backend="eager") == 0


def test_a_canary_that_is_put_back_takes_its_share_and_no_more(server: PlantedServer) -> None:
    assert server.put("/backend", json={"default": "eager", "canary": {"fused": 0.5}}).status_code == 200
    try:
        server.plant("fault")
        while server.state()["state"] == "ready":  # until the canary's turn comes
            assert server.post("/predict", json={"inputs": ROWS}).headers["x-backend"] == "eager"
        server.plant("")
        refused = server.put("/backend", json={"put_back": ["fused"], "default": "turbo"})
        assert (refused.status_code, server.state()["state"]) == (400, "unavailable")
        assert server.put("/backend", json={"canary": {"fused": 0.25}}).status_code == 503
        reply = server.put("/backend", json={"put_back": ["fused"], "canary": {"fused": 0.25}}).json()
        assert (reply["default"], reply["canary"]) == ("eager", {"fused": 0.25})
        assert reply["backends"]["fused"]["state"] == "ready"
        assert "canaries are fused 0.25" in server.output
    finally:
        server.put("/backend", json={"canary": {"eager": 0.1}})


def test_a_caller_who_names_a_backend_gets_its_fault(server: PlantedServer) -> None:
    server.plant("fault")
    reply = server.post("/predict/fused", json={"inputs": ROWS})
    assert (reply.status_code, reply.json()["code"]) == (500, "internal")
    assert "planted" not in reply.text
    assert "planted: an illegal memory access" in server.output
    reply = server.post("/predict/fused", json={"inputs": ROWS})
    assert (reply.status_code, reply.json()["code"], reply.headers["retry-after"]) == (503, "backend_unavailable", "30")
    compared = server.post("/compare", json={"inputs": ROWS}).json()["backends"]
    assert list(compared) == ["eager"]
    compared = server.post("/compare", json={"inputs": ROWS, "backends": ["eager", "fused"]}).json()
    assert compared["backends"]["fused"]["code"] == "backend_unavailable"
    assert compared["backends"]["eager"]["max_abs_diff"] == 0


def test_eager_is_never_taken_out_and_rows_at_fault_accuse_no_backend(server: PlantedServer) -> None:
    tensor = {"name": "input", "shape": [1, 64], "datatype": "FP32", "parameters": {"binary_data_size": 256}}
    head = httpx.Request("POST", server.url, json={"inputs": [tensor]}).read()
    nan = head + b"\x00\x00\xc0\x7f" * 64
    headers = {"inference-header-content-length": str(len(head))}
    for _ in range(20):
        reply = server.post("/v2/models/digits/infer", content=nan, headers=headers)
        assert (reply.status_code, reply.json()["code"]) == (422, "non_finite_output")
    assert server.state()["state"] == "ready"


def test_canaries_take_their_share_and_can_be_changed(server: PlantedServer) -> None:
    def backends(count: int) -> set[str]:
        found: set[str] = set()
        for _ in range(count):
            found.add(server.post("/predict", json={"inputs": ROWS}).headers["x-backend"])
        return found

    assert "canary    eager 0.1\nshadow    0.2 of the requests" in server.output
    assert server.get("/backend").json()["canary"] == {"eager": 0.1}
    try:
        reply = server.put("/backend", json={"canary": {"eager": 0.5}}).json()
        assert (reply["canary"], reply["default"]) == ({"eager": 0.5}, "fused")
        assert backends(60) == {"eager", "fused"}
        assert server.put("/backend", json={"canary": {}}).json()["canary"] == {}
        assert backends(20) == {"fused"}
        assert server.put("/backend", json={"canary": {"eager": 1}}).json()["canary"] == {"eager": 1}
        assert backends(20) == {"eager"}
        bad = [{"turbo": 0.1}, {"eager": 1.5}, {"eager": 0.6, "fused": 0.6}, {"eager": "x"}]
        for canary in bad:
            refused = server.put("/backend", json={"canary": canary})
            assert (refused.status_code, refused.json()["code"]) == (400, "bad_request")
        assert server.get("/backend").json()["canary"] == {"eager": 1}
    finally:
        server.put("/backend", json={"canary": {"eager": 0.1}})


@pytest.mark.parametrize("is_ended", [False, True], ids=["in force", "ended by PUT"])
def test_a_restarted_worker_that_lacks_a_canary_serves_the_others_and_the_canary_is_taken_out(
    tmp_path: Path, tiny_model: Path, is_ended: bool
) -> None:
    flags = ("--model", str(tiny_model), "--backends", "eager,fused", "--default-backend", "eager")
    server = PlantedServer(tmp_path, *flags, "--canary", "fused=0.5")
    rows = {"inputs": [0.5] * 8}

    def restart() -> None:
        (before,) = server.pids_of("worker")
        os.kill(before, signal.SIGKILL)
        server.wait_until(lambda: server.pids_of("worker") not in ([], [before]))
        server.wait_until(lambda: server.answers("/v2/health/ready", 200))

    try:
        server.wait_ready()
        if is_ended:
            assert server.put("/backend", json={"canary": {}}).status_code == 200
        server.plant("missing")
        restart()
        assert {server.post("/predict", json=rows).headers["x-backend"] for _ in range(10)} == {"eager"}
        named = server.post("/predict/fused", json=rows)
        assert (named.status_code, named.json()["code"]) == (503, "backend_unavailable")
        assert server.state()["state"] == "unavailable"
        assert "planted: the library is gone" in server.state()["reason"]
        assert "backend fused is taken out" in server.output
        assert server.fallbacks("unavailable") == 1
        assert server.put("/backend", json={"put_back": ["fused"]}).status_code == 503
        if not is_ended:
            server.plant("")
            restart()
            assert server.state()["state"] == "unavailable"
            assert server.put("/backend", json={"put_back": ["fused"]}).json()["canary"] == {"fused": 0.5}
            assert server.post("/predict/fused", json=rows).status_code == 200
        assert "while it started anew" not in server.output
    finally:
        server.end()
