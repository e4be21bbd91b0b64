"""The server's life: start, screen, signals, end."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from tests.made_model import write_made_model
from tests.service.running_server import (
    ROOT,
    HeldServer,
    RunningServer,
    Start,
    descendants,
    free_port,
    is_alive,
)

pytestmark = pytest.mark.slow  # real servers

EAGER = ("--backends", "eager")


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
        return True
    return False


def refused(*arguments: str) -> str:
    """Run a server that cannot start; return its one line."""
    done = subprocess.run(
        [sys.executable, "-m", "service", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_the_screen_tells_what_is_served_and_how_to_try_it(server: RunningServer) -> None:
    screen = server.output
    for pattern in (
        r"model +digits: 64 -> 10",
        r"device +cpu, float32, 1 worker\(s\) of \d+ thread",
        r"backend +eager +torch",
        r"backend +compiled +inductor",
        r"backend +fused +onednn",
        rf"ready +http://127.0.0.1:{server.port} ",
    ):
        assert re.search(pattern, screen), f"{pattern} in\n{screen}"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_curl_line_on_the_screen_works(server: RunningServer) -> None:
    (line,) = re.findall(r"^try +(curl .*)$", server.output, re.MULTILINE)
    done = subprocess.run(["bash", "-c", f"{line} -s"], capture_output=True, text=True, check=True)
    assert len(json.loads(done.stdout)["outputs"]) == 10


def test_an_interrupt_ends_everything_with_exit_status_0(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    processes = descendants(server.process.pid)
    assert len(processes) >= 3  # LitServe's manager, the worker, the HTTP process
    assert server.stop(signal.SIGINT) == 0
    assert [pid for pid in processes if is_alive(pid)] == []
    assert not listens(server.port)
    assert "Traceback" not in server.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "the terminal's end"])
def test_a_signal_which_reaches_every_process_at_once_ends_as_well(
    start: Start, tiny_model: Path, number: signal.Signals
) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    processes = descendants(server.process.pid)
    os.killpg(server.process.pid, number)
    assert server.wait_exit() == 0
    assert [pid for pid in processes if is_alive(pid)] == []
    assert "Traceback" not in server.output


def test_a_signal_while_starting_ends_everything_too(start: Start) -> None:
    server = start()
    server.wait_until(lambda: len(descendants(server.process.pid)) >= 2)
    processes = descendants(server.process.pid)
    assert server.stop() == 0
    assert [pid for pid in processes if is_alive(pid)] == []
    assert "Traceback" not in server.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_before_anything_is_loaded_is_no_failure(number: signal.Signals) -> None:
    program = f"""
        import os, runpy, sys

        class Sender:
            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] == "models" or name.partition(".")[0] == "pydantic":
                    os.kill(os.getpid(), {number:d})

        sys.meta_path.insert(0, Sender())
        runpy.run_module("service", run_name="__main__")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_screen_that_nobody_reads_keeps_no_server_from_serving_nor_from_its_end(
    tmp_path: Path, tiny_model: Path
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    log, port = tmp_path / "log", free_port()
    command = [sys.executable, "-m", "service", "--model", str(tiny_model), *EAGER, "--port", str(port)]
    with log.open("wb") as errors, subprocess.Popen(command, cwd=ROOT, stdout=writing, stderr=errors) as server:
        os.close(writing)
        try:
            while "could not be written to stdout" not in log.read_text():
                assert server.poll() is None, log.read_text()
                time.sleep(0.02)
            assert httpx.get(f"http://127.0.0.1:{port}/v2/health/ready", timeout=60).status_code == 200
            server.terminate()
            assert server.wait(timeout=60) == 0
        finally:
            server.kill()
    assert "Traceback" not in log.read_text()


class UnheardServer(RunningServer):
    """A server whose stderr goes where the shell is told by STDERR; its log holds what it writes to stdout."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'eval "exec \\"\\$@\\" $STDERR"', "sh", *super().command(arguments)]


@pytest.mark.parametrize("stderr", ["2>/dev/full", "2>&-"])
def test_a_stderr_that_takes_nothing_keeps_no_server_from_serving_nor_its_workers_from_being_restarted(
    tmp_path: Path, tiny_model: Path, stderr: str
) -> None:
    server = UnheardServer(tmp_path / "log", "--model", str(tiny_model), *EAGER, "--log-requests", STDERR=stderr)
    try:
        server.wait_ready()
        os.kill(server.pid_of("worker"), signal.SIGKILL)
        server.wait_until(lambda: server.metric("mlp_worker_restarts_total") == 1)
        server.wait_until(lambda: server.answers("/v2/health/ready", 200))
        assert server.post("/predict", json={"inputs": [0.5] * 8}).status_code == 200
        assert server.stop() == 0
    finally:
        server.end()


def test_a_watch_that_fails_ends_the_server_with_its_reason(tiny_model: Path) -> None:
    program = f"""
        import runpy, service.server, sys

        def screen(*_):
            raise LookupError("planted")

        service.server.screen = screen
        sys.argv[1:] = {["--model", str(tiny_model), *EAGER, "--port", str(free_port())]}
        runpy.run_module("service", run_name="__main__")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "error: the watch over the server's processes failed: LookupError: planted" in done.stderr


def test_liveness_comes_before_readiness_and_readiness_only_when_warm(compiled_code: Path, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    server = HeldServer(tmp_path / "log", "--cache-dir", str(compiled_code), HOLD=str(hold))
    try:
        server.wait_until(lambda: server.answers("/v2/health/live", 200))
        early = server.get("/v2/health/ready")
        assert (early.status_code, early.json()["code"]) == (503, "not_ready")
        assert early.headers["retry-after"]
        assert server.get("/health").status_code == 503
        predicted = server.post("/predict", json={"inputs": [0] * 64})
        assert (predicted.status_code, predicted.json()["code"]) == (503, "not_ready")
        starting = server.get("/backend").json()
        assert starting["default"] is None
        told = {(state["state"], state["reason"]) for state in starting["backends"].values()}
        assert told == {("starting", "no worker is warm yet")}
        hold.unlink()
        server.wait_until(lambda: server.answers("/v2/health/ready", 200))
        states = server.get("/backend").json()["backends"]
        assert {name: state["state"] for name, state in states.items()} == dict.fromkeys(states, "ready")
        assert server.stop() == 0
        assert "Warning" not in server.output
    finally:
        server.end()


def test_a_worker_that_ends_early_each_time_is_started_later_and_later_until_it_holds(
    start: Start, tiny_model: Path
) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    config = tiny_model / "config.json"
    then_ns = config.stat().st_mtime_ns
    os.utime(config, ns=(0, 0))  # another model than the one that is served: a worker refuses to start with it
    os.kill(server.pid_of("worker"), signal.SIGKILL)
    for told in ("exit status 2, 1 in a row; it is started again in 0.5 s", "2 in a row; it is started again in 1 s"):
        server.wait_until(lambda told=told: told in server.output)  # type: ignore[misc]
    down = server.get("/backend").json()
    assert (down["default"], down["backends"]["eager"]["state"]) == (None, "starting")
    assert "the last one ended" in down["backends"]["eager"]["reason"]
    os.utime(config, ns=(then_ns, then_ns))
    server.wait_until(lambda: server.answers("/v2/health/ready", 200))
    told = "soon after it was warm, with signal 9, 2 in a row; it is started again in 0.5 s"
    assert told not in server.output
    steady = "ended with signal 9; it is started anew"  # at once: the first that was warm, and one that served for 10 s
    for steady_ends in range(1, 10):
        assert server.output.count(steady) == steady_ends
        restarts = server.metric("mlp_worker_restarts_total")
        os.kill(server.pid_of("worker"), signal.SIGKILL)
        server.wait_until(
            lambda restarts=restarts: server.metric("mlp_worker_restarts_total") == restarts + 1  # type: ignore[misc]
        )
        server.wait_until(lambda: server.answers("/v2/health/ready", 200))
        if told in server.output:
            break
    assert told in server.output
    assert server.stop() == 0


def ask(server: RunningServer, count: int) -> tuple[list[threading.Thread], list[httpx.Response]]:
    """Send requests of one row side by side, and return once all of them are accepted."""
    replies: list[httpx.Response] = []

    def one() -> None:
        replies.append(httpx.post(server.url + "/predict", json={"inputs": [[0.5] * 8]}, timeout=60))

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: server.accepted() == count)
    return threads, replies


def test_a_worker_that_dies_answers_what_it_held_with_worker_lost(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    with server.stopped("worker") as worker:
        threads, replies = ask(server, 8)
        os.kill(worker, signal.SIGKILL)
    for thread in threads:
        thread.join()
    outcomes = {(reply.status_code, reply.json()["code"], reply.headers["retry-after"]) for reply in replies}
    assert outcomes == {(503, "worker_lost", "1")}
    server.wait_until(lambda: server.answers("/v2/health/ready", 200))
    assert server.metric("mlp_worker_restarts_total") == 1
    assert (server.metric("mlp_inflight_requests"), server.metric("mlp_queue_rows")) == (0, 0)
    assert server.post("/predict", json={"inputs": [[0.5] * 8]}).status_code == 200
    assert server.stop() == 0


def test_what_a_stuck_worker_holds_at_the_end_is_answered_and_ends_nothing_late(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    with server.stopped("worker"):
        threads, replies = ask(server, 24)
        processes = descendants(server.process.pid)
        assert server.stop() == 0
        for thread in threads:
            thread.join()
    assert Counter((reply.status_code, reply.json()["code"]) for reply in replies) == {(503, "draining"): 24}
    assert [pid for pid in processes if is_alive(pid)] == []


def test_requests_that_are_half_sent_at_the_end_are_not_waited_for(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    with contextlib.ExitStack() as opened:
        senders = []
        for length in (b"transfer-encoding: chunked", b"content-length: 100"):
            sender = opened.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            sender.sendall(b"POST /predict HTTP/1.1\r\nhost: x\r\n" + length + b"\r\n\r\n" + b"1\r\n{")
            senders.append(sender)
        server.wait_until(lambda: connections(server.port) == len(senders))
        assert server.stop() == 0
        for reply in (sender.recv(65536) for sender in senders):
            assert reply == b"" or (reply.startswith(b"HTTP/1.1 503") and b'"draining"' in reply)


def connections(port: int) -> int:
    """Count the connections that a local port has taken. Source: https://docs.kernel.org/networking/proc_net_tcp.html."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_a_parent_that_was_stopped_and_continued_goes_on(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager").wait_ready()
    for _ in range(3):
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(0.2)  # longer than one wait of its for a signal
        os.kill(server.process.pid, signal.SIGCONT)
        time.sleep(0.2)
    os.kill(server.pid_of("worker"), signal.SIGKILL)
    server.wait_until(lambda: server.metric("mlp_worker_restarts_total") == 1)  # it still looks after its processes
    server.wait_until(lambda: server.answers("/v2/health/ready", 200))
    assert server.stop() == 0


def test_a_worker_does_not_come_back_with_another_model(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    config = json.loads((tiny_model / "config.json").read_text())
    (tiny_model / "config.json").write_text(json.dumps(config | {"init": {"seed": 1}}))
    os.kill(server.pid_of("worker"), signal.SIGKILL)
    server.wait_until(lambda: "changed since the server started" in server.output)
    assert server.post("/predict", json={"inputs": [0.5] * 8}).json()["code"] == "not_ready"
    assert server.stop() == 0


def test_a_second_server_on_the_same_port_is_refused_even_while_the_first_starts(
    start: Start, tiny_model: Path
) -> None:
    server = start("--model", str(tiny_model), *EAGER)
    server.wait_until(lambda: bool(descendants(server.process.pid)))
    assert "Address already in use" in refused("--model", str(tiny_model), "--port", str(server.port))
    assert server.wait_ready().stop() == 0


def test_weights_that_are_no_numbers_are_a_start_that_could_not_be_made(start: Start, tiny_model: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from models import ModelConfig
    from models.weights import seeded

    config = json.loads((tiny_model / "config.json").read_text())
    weights = seeded(ModelConfig.load(tiny_model))
    next(iter(weights.values())).fill_(torch.nan)
    save_file(weights, tiny_model / "model.safetensors")
    (tiny_model / "config.json").write_text(json.dumps({**config, "init": None}))
    server = start("--model", str(tiny_model), *EAGER)
    assert server.wait_exit() == 2
    assert [line for line in server.output.splitlines() if line.startswith("error:")] == [
        line for line in server.output.splitlines() if "model.safetensors" in line
    ]


def test_an_http_process_that_dies_ends_the_server_with_its_reason(start: Start, tiny_model: Path) -> None:
    server = start("--model", str(tiny_model), *EAGER).wait_ready()
    os.kill(server.pid_of("http"), signal.SIGKILL)
    assert server.wait_exit() == 1
    assert "error: an HTTP process ended unexpectedly" in server.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "80"], "--port (MLP_PORT)"),
        (["--model", "nowhere"], "'nowhere'"),
        (["--api-key", ""], "--api-key (MLP_API_KEY)"),
        (["--cache-dir", "/proc/nowhere"], "--cache-dir /proc/nowhere"),
    ],
    ids=["port", "model", "api-key", "cache-dir"],
)
def test_what_prevents_a_start_is_told_in_one_line(arguments: list[str], message: str) -> None:
    assert message in refused("--port", str(free_port()), *arguments)


def test_a_port_in_use_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert "Address already in use" in refused("--port", str(other.getsockname()[1]))


@pytest.mark.parametrize("damage", ["truncated", "pickle", "absent"])
def test_damaged_weights_are_told_in_one_line(tiny_model: Path, damage: str) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    del config["init"]
    (tiny_model / "config.json").write_text(json.dumps(config))
    weights = tiny_model / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes((ROOT / "models/zoo/digits/model.safetensors").read_bytes()[:1000])
    elif damage == "pickle":
        weights.write_bytes(b"\x80\x04}q\x00.")
    assert "model.safetensors" in refused("--model", str(tiny_model))


@pytest.mark.parametrize(
    "setting", [("--default-backend", "compiled"), ("--canary", "eager=0.1,compiled=0.1")], ids=str
)
def test_a_default_or_canary_backend_that_cannot_run_ends_the_start_with_its_reason(
    start: Start, tiny_model: Path, setting: tuple[str, str]
) -> None:
    server = start("--model", str(tiny_model), *setting, PATH="/nonexistent", CXX="")
    assert server.wait_exit() == 2
    assert "backend 'compiled' is unavailable" in server.output


def test_the_screen_says_where_the_canary_is_the_default_itself(start: Start, tiny_model: Path) -> None:
    flags = ("--model", str(tiny_model), "--backends", "eager,fused", "--canary", "fused=0.05")
    told = "canary    fused 0.05 (fused is the default too, which takes the rest: name another --default-backend)\n"
    assert told in start(*flags).wait_ready().output
    told_apart = start(*flags, "--default-backend", "eager").wait_ready().output
    assert "canary    fused 0.05\n" in told_apart


def test_without_a_compiler_the_other_backends_serve_and_the_screen_says_why(start: Start, tiny_model: Path) -> None:
    no_share = ("--canary", "compiled=0")  # which it need not run for
    server = start("--model", str(tiny_model), *no_share, PATH="/nonexistent", CXX="/opt/inner/bin/cxx").wait_ready()
    assert re.search(r"backend +compiled +unavailable: .*compiler and '/opt/inner/bin/cxx' does not run", server.output)
    asked = server.post("/predict/compiled", json={"inputs": [[0.5] * 8]})
    assert (asked.status_code, asked.json()["code"]) == (503, "backend_unavailable")
    for told in (asked.text, server.get("/backend").text):  # callers learn of no path
        assert "compiler and 'cxx' does not run" in told
    assert "available: eager, fused" in asked.json()["error"]
    assert server.post("/predict", json={"inputs": [[0.5] * 8]}).json()["backend"] == "fused"
    for body in ({"default": "compiled"}, {"default": "eager", "canary": {"compiled": 0.1}}):
        reply = server.put("/backend", json=body)
        assert (reply.status_code, reply.json()["code"]) == (503, "backend_unavailable")
    told = server.get("/backend").json()
    assert (told["default"], told["is_auto"], told["canary"]) == ("fused", True, {})
    assert server.put("/backend", json={"canary": {"compiled": 0}}).status_code == 200
    assert server.stop() == 0


def test_requests_whose_results_no_frame_holds_end_the_start(tmp_path: Path) -> None:
    wide = write_made_model(tmp_path, "wide", dim=65536, hidden=1, depth=1)
    message = "--max-request-rows: expected at most 16383, 4 GiB of this model's rows, got 16384"
    assert message in refused("--model", str(wide), *EAGER, "--max-request-rows", "16384")
