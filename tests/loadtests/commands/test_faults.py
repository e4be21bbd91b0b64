"""What befalls a comparison: a server that answers as none should, workers that come and go, closed streams."""

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from loadtests.evidence import read
from tests.loadtests.commands.test_compare import LIMIT_S, command, compare, environment, refused
from tests.loadtests.faulty_server import Server, faulty_server, slowly
from tests.service.running_server import ROOT

pytestmark = pytest.mark.slow  # processes that load a server

ONE = ("--backends", "fused", "--no-knee", "--rounds", "1", "--users", "2", "--rates", "50", "--seconds", "0.2")
MANY = ("--backends", "fused", "--no-knee", "--rounds", "50", "--users", "2", "--seconds", "0.2", "--warm-up-s", "0.1")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with faulty_server(slowly(0.005)) as server:
        yield server


@contextlib.contextmanager
def started(arguments: list[str], where: Path = ROOT) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        arguments, cwd=where, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=LIMIT_S)
    assert "Traceback" not in errors
    return process.returncode, errors


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not is_so():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < limit
        time.sleep(0.02)


def test_a_reply_that_is_none_ends_the_comparison_and_the_first_one_is_told(tmp_path: Path) -> None:
    def fault(path: str, number: int, right: bytes) -> bytes | None:
        return b"garbage\r\n\r\n" if path.startswith("/predict") and number > 1 else right

    with faulty_server(fault) as server:
        done = compare(tmp_path, "--url", server.url, *ONE)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    first = "replies were not what was asked for; the first: expected an HTTP reply with its content-length"
    assert first in done.stderr
    evidence = read(tmp_path / "compare.json")
    assert set(evidence.runs[0].errors) == {"bad_reply"}
    assert (tmp_path / "report.html").exists()


def test_a_closed_loop_that_gets_no_reply_in_its_time_goes_on_until_one_has_come(tmp_path: Path) -> None:
    with faulty_server(slowly(0.3)) as server:
        plan = ("--rounds", "1", "--users", "1", "--rates", "20", "--seconds", "0.01", "--warm-up-s", "0.01")
        done = compare(tmp_path, "--url", server.url, "--backends", "fused", "--no-knee", *plan)
    assert done.returncode == 0, done.stderr
    closed = read(tmp_path / "compare.json").runs[0]
    assert closed.answered > 0
    assert closed.seconds > 0.2  # since a reply took longer than the warm-up and the time that was asked for
    assert closed.answered_per_s < 10


def elsewhere() -> str:
    """An address of this host that is not loopback's, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def test_workers_from_elsewhere_make_load_and_who_is_too_many_of_another_version_or_gone_is_told(
    server: Server, tmp_path: Path
) -> None:
    shutil.copytree(ROOT / "loadtests", tmp_path / "other" / "loadtests", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "other" / "loadtests" / "extra.py").touch()
    host, out = elsewhere(), tmp_path / "out"
    with socket.create_server((host, 0)) as probe:
        at = f"{host}:{probe.getsockname()[1]}"
    worker = [sys.executable, "-m", "loadtests", "worker", "--master", at]
    flags = ("--url", server.url, *MANY, "--remote-workers", "1", "--bind", at)
    with started(command(out, *flags)) as process, started(worker, tmp_path / "other") as other:
        status, errors = ended(other)
        assert status == 2
        assert "this worker gets no load: it is of another version: " in errors
        with started(worker) as right:
            wait_until((out / "compare.json").exists, process)
            with started(worker) as late:
                assert ended(late) == (
                    2,
                    f"waiting for {at}\nerror: --master {at}: this worker gets no load: --remote-workers 1 are there "
                    "already\n",
                )
            right.kill()
        status, errors = ended(process)
    assert status == 1
    assert f"from elsewhere: python -m loadtests worker --master {at}" in errors
    assert f"error: the worker on {socket.gethostname()} is gone; what was measured before is in" in errors
    evidence = read(out / "compare.json")
    assert evidence.runs[0].answered > 0
    assert evidence.conditions["processes"] == 2


def test_a_worker_of_this_host_that_is_killed_ends_the_comparison(server: Server, tmp_path: Path) -> None:
    with started(command(tmp_path, "--url", server.url, *MANY, "--processes", "2")) as process:
        wait_until((tmp_path / "compare.json").exists, process)
        psutil.Process(process.pid).children()[0].kill()
        status, errors = ended(process)
    assert status == 1
    assert "error: a generator process ended with -9" in errors
    assert read(tmp_path / "compare.json").runs[0].answered > 0


def test_two_measurements_do_not_write_to_one_directory(server: Server, tmp_path: Path) -> None:
    with started(command(tmp_path, "--url", server.url, *MANY)) as first:
        wait_until((tmp_path / "compare.json").exists, first)
        refused(compare(tmp_path, "--url", server.url, *ONE), "another measurement is writing there")
        first.send_signal(signal.SIGHUP)
        time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        assert ended(first)[0] == 130
    assert read(tmp_path / "compare.json").ended_early == "interrupted"
    assert (tmp_path / "report.html").exists()


def test_closed_streams_do_not_matter(server: Server, tmp_path: Path) -> None:
    line = " ".join(command(tmp_path, "--url", server.url, *ONE))
    done = subprocess.run(["sh", "-c", f"{line} <&- >&- 2>&-"], cwd=ROOT, env=environment(), check=False)
    assert done.returncode == 0
    assert json.loads((tmp_path / "compare.json").read_text())["ended_early"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--bind", "203.0.113.1"), "--bind 203.0.113.1: expected an address of this host that is free"),
        (("--bind", "a:b:c"), "--bind: expected HOST or HOST:PORT"),
        (("--key", "schl\u00fcssel"), "--key: expected a key of printable ASCII characters"),
        (("--max-in-flight", "1", "--processes", "2"), "--max-in-flight 1: expected at least one for each process"),
    ],
    ids=["bind", "form", "key", "in flight"],
)
def test_what_no_generator_can_be_is_refused(
    server: Server, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused(compare(tmp_path / "out", "--url", server.url, *arguments), message)
    assert not (tmp_path / "out").exists()
