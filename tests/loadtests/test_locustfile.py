"""Locust patches the standard library where it is imported, so it runs in processes of its own."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.loadtests import fork_server
from tests.loadtests.faulty_server import document, faulty_server, reply
from tests.service.running_server import ROOT, RunningServer, free_port

pytestmark = pytest.mark.slow  # real servers

LIMIT_S = 60
LOCUST = ("locust", "-f", "loadtests/locustfile.py")
LOADED = ("locust.main", "loadtests.generator.driver")
INFER = "/v2/models/digits/infer"


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("MLP_", "LOCUST_"))}


def run(*arguments: str, seconds: int = 2) -> subprocess.CompletedProcess[str]:
    flags = ("--headless", "--users", "4", "--spawn-rate", "4", "--run-time", f"{seconds}s")
    return fork_server.run(LOADED, [*LOCUST, *flags, *arguments], clean_environment())


def rows_of(done: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return {(row["method"], row["name"]): row for row in json.loads(done.stdout)}


@contextlib.contextmanager
def web_page(*arguments: str) -> Iterator[httpx.Client]:
    """A locust with its web page, and a client of that page."""
    port = free_port()
    command = [sys.executable, "-m", *LOCUST, "--web-host", "127.0.0.1", "--web-port", str(port), *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as page:
            limit = time.monotonic() + LIMIT_S
            while True:
                with contextlib.suppress(httpx.TransportError):
                    page.get("/")
                    break
                assert process.poll() is None
                assert time.monotonic() < limit
                time.sleep(0.05)
            yield page
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT_S)


def poll(page: httpx.Client, path: str, key: str) -> list[dict[str, Any]]:
    limit = time.monotonic() + LIMIT_S
    while True:
        found = [row for row in page.get(path).json()[key] if row.get("name") != "Aggregated"]
        if found:
            return found
        assert time.monotonic() < limit
        time.sleep(0.1)


@pytest.mark.slow
def test_without_a_choice_one_class_of_users_drives_each_backend_and_one_names_none(server: RunningServer) -> None:
    rows = rows_of(run("--host", server.url, "--json"))
    paths = {"/predict", "/predict/eager", "/predict/compiled", "/predict/fused"}
    assert set(rows) == {(kind, path) for kind in ("POST", "QUEUE", "COMPUTE") for path in paths}
    for path in paths:
        assert rows["POST", path]["num_requests"] > 0
        assert rows["POST", path]["num_failures"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("choice", [("--tags", "eager"), ("--backend", "eager"), ("Eager",)], ids=" ".join)
def test_a_tag_a_flag_or_a_class_name_leaves_one_backend(server: RunningServer, choice: tuple[str, ...]) -> None:
    rows = rows_of(run("--host", server.url, "--rows", "3", "--json", *choice))
    assert {name for _, name in rows} == {"/predict/eager"}
    assert rows["POST", "/predict/eager"]["num_failures"] == 0


@pytest.mark.slow
def test_binary_tensors_are_sent_and_whole_binary_replies_come_back(server: RunningServer) -> None:
    rows = rows_of(
        run("--host", server.url, "--wire", "binary", "--rows", "16", "--tags", "fused", "default", "--json")
    )
    assert {name for _, name in rows} == {f"{INFER} fused", f"{INFER} default"}
    for name in (f"{INFER} fused", f"{INFER} default"):
        row = rows["POST", name]
        assert row["num_requests"] > 0
        assert row["num_failures"] == 0
        assert row["total_content_length"] > row["num_requests"] * 16 * 10 * 4


@pytest.mark.slow
def test_times_are_kept_to_10_microseconds_and_the_server_s_own_stand_beside_them(server: RunningServer) -> None:
    rows = rows_of(run("--host", server.url, "--backend", "eager", "--json"))
    assert {kind for kind, _ in rows} == {"POST", "QUEUE", "COMPUTE"}
    for row in rows.values():
        kept = [float(key) for key in row["response_times"]]
        assert kept == [round(key, 2) for key in kept]
        assert any(key != round(key) for key in kept)
        assert sum(row["response_times"].values()) == row["num_requests"]


@pytest.mark.slow
def test_workers_of_a_distributed_run_report_at_the_same_resolution(server: RunningServer, tmp_path: Path) -> None:
    done = run("--host", server.url, "--tags", "fused", "--processes", "2", "--json-file", str(tmp_path / "rows"))
    assert done.returncode == 0, done.stderr
    rows = {row["method"]: row for row in json.loads((tmp_path / "rows.json").read_text())}
    assert set(rows) == {"POST", "QUEUE", "COMPUTE"}
    assert rows["POST"]["num_failures"] == 0
    assert any(float(key) != round(float(key)) for key in rows["POST"]["response_times"])


# A locustfile by whose clock two thirds of a minute have passed whenever a reply has come.
CLOCK = """
from locust import events
from loadtests.generator import shape

now_s, is_answered = 0.0, False

@events.request.add_listener
def answer(**_):
    global is_answered
    is_answered = True

def run_time_s(_):
    global now_s, is_answered
    now_s, is_answered = now_s + 40 * is_answered, False
    return now_s

shape.ProfileShape.get_run_time = run_time_s
"""


def test_users_come_as_a_scenario_says(server: RunningServer, tmp_path: Path) -> None:
    clock = tmp_path / "clock.py"
    clock.write_text(CLOCK)
    flags = ("-f", f"loadtests/locustfile.py,{clock}", "--backend", "eager", "--scenario", "ramp", "--loglevel", "INFO")
    done = run("--host", server.url, *flags, "--json", seconds=60)
    assert rows_of(done)["POST", "/predict/eager"]["num_failures"] == 0
    counts = re.findall(r"Shape test updating to (\d+) users", done.stderr)
    assert counts == ["1", "3"]  # at once, and of 4 after two thirds of the time


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "nope"), "--model nope: 404 not_found: no model 'nope' here; this server has 'digits'"),
        (("--tags", "nope"), "no class of users is left"),
        (("--rows", "0"), "--rows: expected a whole number of at least 1, got '0'"),
        (("--rows", "2000", "Eager"), "--rows 2000: the server takes at most 1024 rows a request"),
        (("--wire", "carrier-pigeon"), "--wire: invalid choice: 'carrier-pigeon'"),
    ],
    ids=["model", "tags", "rows", "too many rows", "wire"],
)
def test_what_the_server_does_not_have_ends_the_run_with_one_line(
    server: RunningServer, arguments: tuple[str, ...], message: str
) -> None:
    done = run("--host", server.url, *arguments)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr
    assert "/predict" not in done.stdout + done.stderr


def test_a_server_that_is_not_there_ends_the_run_with_one_line() -> None:
    done = run("--host", f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 2
    assert done.stderr.count("no reply: ") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("path", "sent", "arguments", "message"),
    [
        ("/v2/models/m", document([]), (), "expected this project's server, got other metadata"),
        ("/v2/models/m", reply(b"[" * 100_000), (), "expected this project's server, got other metadata"),
        ("/model", document({"error": "key", "code": "no"}, "401 No"), (), "401 no: key; set MLP_API_KEY to"),
        ("", b"", ("--rows", "1000000000"), "--rows 1000000000: the server takes at most 64 rows a request"),
        ("", b"", ("--key", "a\nb"), "--key: expected a key of printable ASCII characters"),
        ("", b"", ("--host", "http://127.0.0.1:99999"), "--host http://127.0.0.1:99999: Port out of range"),
        ("", b"", ("--users", "-3"), "--users: expected a whole number of at least 0, got -3"),
    ],
    ids=["list", "deep", "unauthorized", "rows", "key", "port", "users"],
)
def test_a_server_or_a_setting_that_is_none_ends_the_run_with_one_line(
    path: str, sent: bytes, arguments: tuple[str, ...], message: str
) -> None:
    with faulty_server(lambda asked, _, right: sent if asked == path else right) as server:
        done = run("--host", server.url, "--model", "m", "--backend", "fused", *arguments)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_a_host_is_asked_for() -> None:
    done = run()
    assert done.returncode == 2
    assert "--host: expected the server's address" in done.stderr


@pytest.mark.slow
def test_the_web_page_starts_a_run_with_its_own_fields(server: RunningServer) -> None:
    with web_page("--host", server.url, "--tags", "fused") as page:
        fields = {"user_count": "2", "spawn_rate": "2", "rows": "4", "wire": "binary", "model": "digits"}
        assert page.post("/swarm", data=fields).json()["success"]
        rows = poll(page, "/stats/requests", "stats")
        page.get("/stop")
    assert {row["name"] for row in rows} == {f"{INFER} fused"}
    post = next(row for row in rows if row["method"] == "POST")
    assert post["num_failures"] == 0
    assert post["min_response_time"] == round(post["min_response_time"], 2) > 0


@pytest.mark.slow
def test_the_web_page_says_once_what_the_server_does_not_have(server: RunningServer) -> None:
    with web_page("--host", server.url) as page:
        page.post("/swarm", data={"user_count": "8", "spawn_rate": "8", "model": "nope"})
        (fault,) = poll(page, "/exceptions", "exceptions")
        (total,) = page.get("/stats/requests").json()["stats"]
        page.get("/stop")
    assert "--model nope: 404 not_found" in fault["msg"]
    assert fault["count"] == 1
    assert total["num_requests"] == 0
