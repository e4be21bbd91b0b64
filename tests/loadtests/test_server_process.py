import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from loadtests.server_process import (
    CHOSEN,
    ServerFlagError,
    ServerProcess,
    ServerStartError,
    free_port,
    require_free_flags,
)

ROOT = Path(__file__).parents[2]
NEVER_READY = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(503)

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
KILLED = """
import sys, threading, time
from loadtests.server_process import ServerProcess

server = ServerProcess(lambda _: [sys.executable, "-c", "import time; time.sleep(600)"], "/")
def tell():
    while server.pid is None:
        time.sleep(0.01)
    print(server.pid, flush=True)
threading.Thread(target=tell, daemon=True).start()
with server:
    pass
"""


def test_a_server_that_ends_at_once_is_named_by_a_command_that_can_be_repeated() -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(ServerStartError) as caught, ServerProcess(lambda _: command, "/"):
        pass
    assert str(caught.value) == f"{sys.executable} -c 'raise SystemExit(3)': ended with 3 before it was ready"


def test_a_server_can_be_refused_once_it_answers_and_before_it_is_ready() -> None:
    server = ServerProcess(lambda port: [sys.executable, "-c", NEVER_READY, str(port)], "/", on_answer=refuse)
    with pytest.raises(LookupError) as caught, server:
        pass
    assert caught.value.args == (f"asked {server.port}",)
    assert server.pid is not None
    assert not psutil.pid_exists(server.pid)


def refuse(port: int) -> None:
    raise LookupError(f"asked {port}")


def test_a_server_that_is_given_up_while_it_starts_is_ended() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    server = ServerProcess(lambda _: command, "/")
    has_ended = threading.Event()

    def give_up() -> None:
        while server.pid is None and not has_ended.wait(0.01):
            pass
        if not has_ended.is_set():
            os.kill(os.getpid(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    thread = threading.Thread(target=give_up)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt), server:
            pass
    finally:
        has_ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert server.pid is not None
    assert not psutil.pid_exists(server.pid)


def test_a_server_whose_measurement_is_killed_while_it_starts_is_ended() -> None:
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as measurement:
        assert measurement.stdout is not None
        server = psutil.Process(int(measurement.stdout.readline()))
        while "loadtests.orphan_guard" in server.cmdline():
            time.sleep(0.01)
        measurement.kill()
    psutil.wait_procs([server], timeout=60)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


def test_a_server_is_confined_to_its_cores_before_its_first_line(tmp_path: Path) -> None:
    file, core = tmp_path / "cores", min(os.sched_getaffinity(0))
    code = f"import os; open({str(file)!r}, 'w').write(str(os.sched_getaffinity(0))); raise SystemExit(3)"
    server = ServerProcess(lambda _: [sys.executable, "-c", code], "/", cpus=frozenset({core}))
    with pytest.raises(ServerStartError, match=f"^{sys.executable} -c .*: ended with 3"), server:
        pass
    assert file.read_text() == str({core})


def test_a_port_is_given_to_nobody_else_before_a_server_listens_on_it() -> None:
    with free_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # as the system does for who asks for any
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass


@pytest.mark.parametrize("flag", [*CHOSEN, "--po", "--port=24040", "--api-k"])
def test_a_flag_for_the_server_that_the_measurement_chooses_is_refused(flag: str) -> None:
    with pytest.raises(ServerFlagError, match=f"-- {flag.partition('=')[0]}: expected no --"):
        require_free_flags(["--threads", "1", flag, "24040"])


def test_other_flags_are_the_server_s_own() -> None:
    require_free_flags(["--threads", "1", "--max-queue-rows=8", "--hold-share", "0", "--", "-1"])
