"""`compare` against real servers; it runs in processes of its own, since locust patches the standard library."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from loadtests.affinity import listed
from loadtests.evidence import Evidence, read
from tests.loadtests import fork_server
from tests.loadtests.faulty_server import Fault, faulty_server
from tests.loadtests.tampering_proxy import tampering_proxy
from tests.service.running_server import ROOT, RunningServer, Start, free_port

pytestmark = pytest.mark.slow  # real servers under load

LIMIT_S = 120
BRIEF = ("--seconds", "0.3", "--warm-up-s", "0.1", "--no-knee")
ON_ONE_CORE = ("--server-cpus", str(min(os.sched_getaffinity(0))))
SHORT = (*BRIEF, "--rounds", "1", "--users", "2", "--rates", "60")


def command(out: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "loadtests", "compare", "--out", str(out), *arguments]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("MLP_", "LOCUST_"))}


def compare(out: Path, *arguments: str, **others: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run_loadtests("compare", "--out", str(out), *arguments, environment=environment() | others)


@contextmanager
def comparing(out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A comparison that has kept its first run."""
    process = subprocess.Popen(
        command(out, *arguments), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        limit = time.monotonic() + LIMIT_S
        while not (out / "compare.json").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < limit
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def loads(evidence: Evidence) -> list[tuple[int, str, int | float | None, str]]:
    return [(each.round, each.loop, each.users or each.rate_per_s, each.backend) for each in evidence.runs]


def test_backends_take_turns_under_the_same_loads(server: RunningServer, tmp_path: Path) -> None:
    flags = ("--url", server.url, "--server-pid", str(server.process.pid), "--backends", "eager,fused", "--rows", "3")
    plan = ("--rounds", "2", "--users", "1,3", "--rates", "50,100")
    done = compare(tmp_path, *flags, "--wire", "binary", *plan, *BRIEF)
    assert done.returncode == 0, done.stderr
    evidence = read(tmp_path / "compare.json")
    in_turn = list(enumerate((("eager", "fused"), ("fused", "eager"))))
    assert loads(evidence) == [
        *((number, "closed", users, each) for number, order in in_turn for users in (1, 3) for each in order),
        *((number, "open", rate, each) for number, order in in_turn for rate in (50, 100) for each in order),
    ]
    assert evidence.backends == {"eager": "torch", "fused": "onednn"}
    assert (evidence.model, evidence.rows, evidence.wire, evidence.ended_early) == ("digits", 3, "binary", None)
    assert evidence.command[:4] == ["python", "-m", "loadtests", "compare"]
    for run in evidence.runs:
        assert run.latency_ms is not None
        assert run.stages_ms is not None
        assert run.answered > 0
        assert run.wrong == 0
        assert run.errors.keys() <= {"unsent"}  # which a busy host may bring
        assert run.checked > 0
        assert sum(count for _, count in run.histogram) == run.answered == sum(run.batch_rows.values())
        assert run.latency_ms.p50 <= run.latency_ms.p99 <= run.latency_ms.max
        stages = (run.stages_ms.queue, run.stages_ms.batch, run.stages_ms.compute, run.stages_ms.encode)
        assert min(stages) >= 0
        assert run.stages_ms.compute > 0
        assert sum(stages) + run.stages_ms.wire == pytest.approx(run.latency_ms.mean)
        assert run.server_cpu is not None
        assert (run.first_ms or 0) > 0
    pairs = zip(evidence.runs[::2], evidence.runs[1::2], strict=True)
    assert all(a.due == b.due > 0 for a, b in pairs if a.loop == "open")
    files = {"locust.html", "locust_stats.csv", "locust_failures.csv", "report.html"}
    assert {path.name for path in tmp_path.iterdir()} > files
    assert "100/s" in (tmp_path / "locust_stats.csv").read_text()


def test_a_server_is_started_as_chosen_searched_for_its_knee_by_two_processes_and_ended(
    tiny_model: Path, tmp_path: Path
) -> None:
    environment_of_a_server = {
        "MLP_HOST": "::",
        "MLP_PORT": str(free_port()),
        "MLP_MODEL": "nowhere",
        "MLP_BACKENDS": "eager",
        "MLP_DTYPE": "bfloat16",
        "MLP_DEFAULT_BACKEND": "compiled",
        "MLP_CANARY": "compiled=0.5",
        "MLP_API_KEY": "other",
    }
    flags = ("--backends", "fused", "--users", "2", "--rounds", "1", "--seconds", "0.2", "--warm-up-s", "0.05")
    search = ("--objective-ms", "1000", "--max-in-flight", "8", "--processes", "2", "--key", "secret")
    server = ("--", "--threads", "1")
    done = compare(tmp_path / "out", str(tiny_model), *flags, *search, *server, **environment_of_a_server)
    assert done.returncode in (0, 1), done.stderr
    evidence = read(tmp_path / "out" / "compare.json")
    assert evidence.ended_early is None, done.stderr
    assert evidence.model == "tiny"
    assert evidence.conditions["processes"] == 2
    assert all(run.due > 0 for run in evidence.runs)
    assert all(run.due - run.answered == sum(run.errors.values()) for run in evidence.runs)
    (knee,) = evidence.knees
    assert done.returncode == (1 if knee.rate_per_s is None else 0), done.stderr
    if knee.rate_per_s is None:
        assert knee.note is not None
        assert knee.note in done.stdout
        assert "error: no backend has a rate that holds" in done.stderr
    else:
        assert knee.above_per_s is not None
        assert knee.rate_per_s < knee.above_per_s <= knee.rate_per_s * 1.0501
        assert max(each.rate_per_s or 0 for each in evidence.runs) >= 2 * knee.rate_per_s * 0.999
        assert "fused: p99 within 1000 ms up to" in done.stdout


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this process may use one core alone")
def test_a_server_and_its_load_have_cores_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    usable = frozenset(os.sched_getaffinity(0))
    mine = int(ON_ONE_CORE[1])
    flags = (str(tiny_model), "--backends", "eager", "--users", "1", "--rounds", "50", "--processes", "2")
    with comparing(tmp_path / "out", *flags, *BRIEF, *ON_ONE_CORE) as process:
        comparison = psutil.Process(process.pid)
        (server,) = (each for each in comparison.children() if "service" in each.cmdline())
        of_server = {server, *server.children(recursive=True)}
        of_load = {comparison, *comparison.children(recursive=True)} - of_server
        assert (len(of_server) > 1, len(of_load)) == (True, 3)
        assert cores_of(of_server) == {frozenset({mine})}
        assert cores_of(of_load) == {usable - {mine}}
        interrupted(process, signal.SIGINT, tmp_path / "out" / "compare.json")
    conditions = read(tmp_path / "out" / "compare.json").conditions
    assert conditions["cores"] == len(usable)
    assert conditions["server_cpus"] == str(mine)
    assert conditions["generator_cpus"] == listed(usable - {mine})
    assert "server_cpus" in (tmp_path / "out" / "report.html").read_text()


def cores_of(processes: Iterable[psutil.Process]) -> set[frozenset[int]]:
    """The cores of every thread."""
    found = set()
    for thread in (thread for each in processes for thread in each.threads()):
        with suppress(ProcessLookupError):  # it has ended
            found.add(frozenset(os.sched_getaffinity(thread.id)))
    return found


STALLING = ("--backends", "fused", "--no-knee", "--rounds", "1", "--users", "1", "--rates", "200", "--warm-up-s", "0.1")


def at_a_request_of_the_open_loop(out: Path, what: Callable[[], None]) -> Fault:
    """Do something once, while a server answers nobody: at the 40th request after the closed loop's run was kept."""
    lock, left = threading.Lock(), [40]

    def fault(path: str, number: int, right: bytes) -> bytes | None:
        if path == "/predict/fused" and number > 1:
            time.sleep(0.002)  # without which the closed loop would keep a core busy
            with lock:
                left[0] -= (out / "compare.json").exists()
                if left[0] == 0:
                    left[0] = -1
                    what()
        return right

    return fault


def test_a_stall_delays_what_is_due_meanwhile_and_none_of_it_is_left_out(tmp_path: Path) -> None:
    with faulty_server(at_a_request_of_the_open_loop(tmp_path, lambda: time.sleep(0.6))) as server:
        done = compare(tmp_path, "--url", server.url, *STALLING, "--seconds", "1")
    assert done.returncode == 0, done.stderr
    run = read(tmp_path / "compare.json").runs[-1]
    assert run.loop == "open"
    assert run.latency_ms is not None
    assert run.latency_ms.max > 500
    delayed = sum(count for bound, count in run.histogram if bound > 100)
    assert delayed > 30  # of the 120 that were due in 0.6 s; a closed loop would count one a user
    assert run.due > 150


def test_a_generator_that_stalls_counts_the_delay_and_marks_its_run(tmp_path: Path) -> None:
    generator: Future[int] = Future()

    def stall() -> None:
        os.kill(generator.result(), signal.SIGSTOP)
        time.sleep(0.6)
        os.kill(generator.result(), signal.SIGCONT)

    with faulty_server(at_a_request_of_the_open_loop(tmp_path, stall)) as server:
        arguments = command(tmp_path, "--url", server.url, *STALLING, "--seconds", "1")
        with subprocess.Popen(
            arguments, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            generator.set_result(process.pid)
            output, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    runs = read(tmp_path / "compare.json").runs
    assert runs[-1].loop == "open"
    assert runs[-1].latency_ms is not None
    assert runs[-1].latency_ms.max > 300
    assert "1% of the requests left more than" in str(runs[-1].invalid)
    invalid = sum(run.invalid is not None for run in runs)
    assert f"{invalid} of 2 runs say nothing about the server" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backends", "fused,nope"), "--backends: the server has eager, compiled, fused ready, not nope"),
        (("--backends", ","), "--backends: expected at least one name, got ','"),
        (("nope",), "no model 'nope' here, this server has 'digits'; give the model: digits"),
        (("out/mien",), "out/mien: no such directory"),
        (("--", "--threads", "1"), "-- --threads 1: expected no flags of a server beside --url"),
        (("--server-cpus", "0"), "--server-cpus 0: expected no --url, whose server runs already"),
        (("--server-cpus", "0-"), "--server-cpus: expected cores as a list such as 0,2-3"),
        (("--rows", "5000"), "--rows 5000: the server takes at most 1024 rows a request"),
        (("--server-pid", "4194303"), "--server-pid: there is no process 4194303"),
        (("--url", "ftp://x"), "--url: expected the server's address"),
        (("--users", "0"), "--users: expected a whole number from 1 to 65536, got '0'"),
    ],
    ids=["backend", "no backend", "model", "directory", "flags", "cores", "list", "rows", "pid", "url", "users"],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(
    server: RunningServer, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    refused(compare(tmp_path / "out", "--url", server.url, *arguments), message)
    assert not (tmp_path / "out").exists()


def test_a_server_that_is_not_there_or_not_ready_is_named(server: RunningServer, tmp_path: Path) -> None:
    port = free_port()
    refused(compare(tmp_path, "--url", f"http://127.0.0.1:{port}"), f"http://127.0.0.1:{port}: expected a server, got")

    def unready(path: str, status: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path == "/v2/health/ready":
            return 503, headers, json.dumps({"error": "warming up", "code": "not_ready"}).encode()
        return status, headers, body

    with tampering_proxy(server.url, unready) as url:
        refused(compare(tmp_path, "--url", url), "expected a server that is ready, got 503 not_ready: warming up")


def test_more_rows_than_the_server_that_is_started_takes_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    done = compare(tmp_path / "out", "--backends", "eager", "--rows", "9", "--", "--max-request-rows", "8")
    refused(done, "--rows 9: the server takes at most 8 rows a request")
    assert not (tmp_path / "out").exists()


def test_a_directory_that_cannot_be_written_to_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(compare(tmp_path / "file" / "out"), "expected a directory that can be written to")


def test_a_server_that_dies_leaves_what_was_measured_before_without_its_key(
    tiny_model: Path, tmp_path: Path, start: Start
) -> None:
    server = start("--model", str(tiny_model), "--backends", "eager", MLP_API_KEY="secret").wait_ready()
    flags = ("--url", server.url, "--backends", "eager", "--users", "2", "--rounds", "50", *BRIEF)
    keyless = compare(tmp_path, *flags)
    refused(keyless, "401 unauthorized")
    refused(keyless, "; set MLP_API_KEY to the server's key, or give it with --key")
    with comparing(tmp_path, *flags, "--key", "secret") as process:
        for each in [*psutil.Process(server.process.pid).children(recursive=True), server.process]:
            each.kill()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    assert "error: eager, 2 users: the server stopped answering: " in errors
    assert "Traceback" not in errors
    evidence = read(tmp_path / "compare.json")
    assert "stopped answering" in str(evidence.ended_early)
    assert evidence.model == "tiny"  # which the server said
    assert evidence.runs[0].invalid is None
    assert evidence.runs[-1].invalid == evidence.ended_early
    assert "secret" not in (tmp_path / "compare.json").read_text()


def interrupted(process: subprocess.Popen[str], number: signal.Signals, path: Path) -> None:
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, errors
    assert "error: interrupted; what was measured before is in" in errors
    assert "Traceback" not in errors
    evidence = read(path)
    assert evidence.ended_early == "interrupted"
    assert evidence.runs
    assert path.with_name("report.html").exists()


def test_an_interrupt_keeps_what_ran_and_ends_every_process(tiny_model: Path, tmp_path: Path) -> None:
    flags = (str(tiny_model), "--backends", "eager", "--users", "2", "--rounds", "50", "--processes", "2")
    with comparing(tmp_path / "out", *flags, *BRIEF) as process:
        children = psutil.Process(process.pid).children(recursive=True)
        interrupted(process, signal.SIGINT, tmp_path / "out" / "compare.json")
    assert psutil.wait_procs(children, timeout=LIMIT_S)[1] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
@pytest.mark.parametrize("has_workers", [False, True], ids=["at the start", "in the warm-up"])
def test_a_server_that_starts_is_ended_with_its_comparison(
    tiny_model: Path, tmp_path: Path, number: int, has_workers: bool
) -> None:
    flags = (str(tiny_model), "--backends", "eager")
    with subprocess.Popen(
        command(tmp_path / "out", *flags), cwd=ROOT, env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            comparison, limit = psutil.Process(process.pid), time.monotonic() + LIMIT_S
            started: list[psutil.Process] = []
            while not (len(started) > 1 if has_workers else started):
                assert process.poll() is None
                assert time.monotonic() < limit
                started = comparison.children(recursive=True)
            process.send_signal(number)
            assert process.stderr is not None
            said = process.stderr.read()  # until the server, which writes there as well, is gone
        finally:
            process.kill()
    if number == signal.SIGINT:
        assert (process.returncode, said.splitlines()[-1:]) == (130, ["error: interrupted"]), said
    assert psutil.wait_procs(started, timeout=LIMIT_S)[1] == []


@pytest.mark.parametrize("arguments", [("compare",), ("scenario", "steady")], ids=["compare", "scenario"])
def test_a_flag_for_the_server_that_is_chosen_is_refused_before_it_starts(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    flags = ("--out", str(tmp_path), "--", "--threads", "1", "--port", "24040")
    done = fork_server.run_loadtests(*arguments, *flags, environment=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: -- --port: expected no --port for the server behind `--`: a free port is taken\n"


def test_sigterm_ends_a_comparison_as_an_interrupt_does(server: RunningServer, tmp_path: Path) -> None:
    with comparing(tmp_path, "--url", server.url, "--backends", "eager", "--rounds", "50", *BRIEF) as process:
        interrupted(process, signal.SIGTERM, tmp_path / "compare.json")


def test_a_wrong_answer_fails_the_run_by_row_and_amount(server: RunningServer, tmp_path: Path) -> None:
    def add(path: str, status: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        if path == "/predict/fused":
            document = json.loads(body)
            document["outputs"][1][0] += 0.5
            body = json.dumps(document).encode()
        return status, headers, body

    with tampering_proxy(server.url, add) as url:
        done = compare(tmp_path, "--url", url, "--backends", "eager,fused", "--rows", "3", *SHORT)
    assert done.returncode == 1
    assert "error: wrong answer from fused: row 1 of 3 in a reply is 0.5 off what eager answers" in done.stderr
    evidence = read(tmp_path / "compare.json")
    assert [each.wrong > 0 for each in evidence.runs] == [False, True]


def test_a_server_of_another_version_is_refused(server: RunningServer, tmp_path: Path) -> None:
    def strip(_: str, status: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers.pop("x-encode-us", None)
        return status, headers, body

    with tampering_proxy(server.url, strip) as url:
        refused(compare(tmp_path, "--url", url), "got a reply without x-encode-us; the server is of another version")


def test_errors_alone_end_the_comparison(server: RunningServer, tmp_path: Path) -> None:
    seen: list[str] = []

    def refuse(path: str, status: int, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        seen.append(path)
        if path == "/predict/eager" and seen.count(path) > 1:  # the first one is a trial
            return 500, headers, json.dumps({"error": "a fault", "code": "internal"}).encode()
        return status, headers, body

    with tampering_proxy(server.url, refuse) as url:
        done = compare(tmp_path, "--url", url, "--backends", "eager", *SHORT)
    assert done.returncode == 1
    assert "eager, 2 users: no request was answered with 200: " in done.stderr
    assert " internal" in done.stderr
    assert set(read(tmp_path / "compare.json").runs[0].errors) == {"internal"}
