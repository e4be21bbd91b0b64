import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from loadtests.peers.server_tree import ServerTree, ServerTreeError, is_alive

# Leaves behind a child in a session of its own that takes no notice of SIGTERM.
LEAVING = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(99)"
subprocess.Popen([sys.executable, "-c", child], start_new_session=True)
time.sleep(99)
"""
# Tells the process of a server that has begun, and waits.
KILLED = """
import sys, time
from pathlib import Path
from loadtests.peers.server_tree import ServerTree

log = Path(sys.argv[1])
with ServerTree([sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(99)"], {}, log) as server:
    server.wait(lambda: "begun" in log.read_text(), 30)
    print(server.processes()[0].pid, flush=True)
    time.sleep(99)
"""
ROOT = Path(__file__).parents[3]


def tree(code: str, log: Path) -> ServerTree:
    return ServerTree([sys.executable, "-c", textwrap.dedent(code)], {"TOLD": "yes"}, log)


@pytest.mark.slow
def test_what_a_server_leaves_behind_is_ended_and_nothing_else(tmp_path: Path) -> None:
    log = tmp_path / "log"
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    try:
        with tree(LEAVING, log) as server:
            server.wait(lambda: "deaf" in log.read_text(), 30)
            processes = server.processes()
            assert server.memory_bytes() > sum(each.memory_full_info().uss for each in processes) > 0
        assert len(processes) == 2
        assert [each for each in processes if psutil.pid_exists(each.pid)] == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_server_is_told_by_its_environment(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with tree("import os, time; print(os.environ['TOLD'], flush=True); time.sleep(99)", log) as server:
        assert server.wait(lambda: log.read_text() == "yes\n", 30) > 0


def test_a_server_that_ends_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerTreeError, match="ended with status 3 before it answered; its last words: no room"),
        tree("print('starting'); print('no room'); exit(3)", tmp_path / "log") as server,
    ):
        server.wait(lambda: False, 30)


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerTreeError, match=r"^it did not answer within 0\.1 s$"),
        tree("import time; time.sleep(99)", tmp_path / "log") as server,
    ):
        server.wait(lambda: False, 0.1)


def test_a_program_that_is_not_there_cannot_be_started(tmp_path: Path) -> None:
    with (
        pytest.raises(ServerTreeError, match=r"before it answered; its last words: /nowhere/at/all: No such file"),
        ServerTree(["/nowhere/at/all"], {}, tmp_path / "log") as server,
    ):
        server.wait(lambda: False, 30)


def test_a_server_whose_comparison_is_killed_is_ended(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as comparison:
        assert comparison.stdout is not None
        server = psutil.Process(int(comparison.stdout.readline()))
        comparison.kill()
    psutil.wait_procs([server], timeout=20)
    assert not is_alive(server)
