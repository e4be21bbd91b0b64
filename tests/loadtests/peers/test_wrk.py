import dataclasses
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.connection import Connection, post
from loadtests.measuring.overhead import echo_command
from loadtests.peers import wrk
from loadtests.server_process import ServerProcess
from tests.service.running_server import free_port

COUNTS = (
    '{"timeout": 0, "p99_us": 900, "requests": 5000, "connect": 0, "p50_us": 100, "read": 0, "duration_us": 2000000, '
    '"max_us": 1500, "write": 0, "p90_us": 300, "status": 0}'
)
LOAD = wrk.WrkResult(5000, 2000000, 100, 300, 900, 1500, {}, 0.25)
installed = pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")


@pytest.fixture(scope="module")
def echo() -> Iterator[int]:
    with ServerProcess(echo_command, "/") as server:
        yield server.port


def test_a_lua_literal_holds_any_byte() -> None:
    assert wrk.lua_string('say "\\" to é') == r'"say \034\092\034 to \195\169"'
    assert wrk.lua_string(bytes([0, 10, 65, 255])) == r'"\000\010A\255"'


def test_the_script_sends_the_body_and_the_headers() -> None:
    text = wrk.script("/predict", {"content-type": "a/b"}, b"\x00x")
    assert 'wrk.method = "POST"\nwrk.path = "/predict"\nwrk.body = "\\000x"\n' in text
    assert 'wrk.headers["content-type"] = "a/b"' in text


def test_what_the_script_tells_is_read() -> None:
    load = wrk.parsed(f"Running 2s test\n  1 threads\n\n{wrk.MARK}{COUNTS}\n", 0.25)
    assert load == LOAD
    assert load.requests_per_s == 2500
    assert load.fault is None


@pytest.mark.parametrize(
    "output",
    ["Running 2s test\n", f"{wrk.MARK}{COUNTS}\n" * 2, f"{wrk.MARK}{{}}", f"{wrk.MARK}{COUNTS[:-9]}"],
    ids=["nothing", "twice", "empty", "cut off"],
)
def test_anything_else_is_no_result(output: str) -> None:
    with pytest.raises(wrk.LoadError, match="wrk: expected one line of counts"):
        wrk.parsed(output, 0.0)


def test_errors_and_silence_are_faults() -> None:
    load = wrk.parsed(
        f"{wrk.MARK}{COUNTS}".replace('"status": 0', '"status": 7').replace('"read": 0', '"read": 2'), 0.0
    )
    assert load.fault == "7 replies with a status of 400 or above, 2 connections that ended in mid-reply"
    assert dataclasses.replace(LOAD, requests=0).fault == "no reply at all"


def test_without_wrk_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(wrk.LoadError, match="not on PATH; install it, on Debian with: apt-get install wrk"):
        wrk.version()


@installed
def test_wrk_sends_the_bytes_that_it_is_given(tmp_path: Path) -> None:
    file = tmp_path / "load.lua"
    body = bytes(range(256))
    file.write_text(wrk.script("/p", {"x-header": "é"}, body) + "io.write(wrk.format())")
    port = free_port()
    done = subprocess.run(["wrk", "-d", "1s", "-s", file, f"http://127.0.0.1:{port}"], capture_output=True, check=False)
    head, _, sent = done.stdout.partition(b"\r\n\r\n")
    assert b"POST /p HTTP/1.1" in head
    assert b"x-header: \xc3\xa9" in head
    assert sent.startswith(body)


@installed
@pytest.mark.slow
def test_a_load_is_counted(echo: int) -> None:
    load = wrk.load(echo, "/", {"content-type": "application/json"}, b"{}", connections=3, seconds=1)
    assert load.fault is None
    assert load.requests > 3
    assert 0 < load.p50_us <= load.p90_us <= load.p99_us <= load.max_us
    with Connection("127.0.0.1", echo) as connection:
        assert connection.time_ns(post("/", b"{}")) > 0


@installed
def test_nobody_to_load_is_an_error() -> None:
    with pytest.raises(wrk.LoadError, match=r"unable to connect to 127\.0\.0\.1"):
        wrk.load(free_port(), "/", {}, b"", connections=1, seconds=1)
