"""A real server as a process of its own, for tests."""

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
TITLE = "fused-mlp-server: "
START_LIMIT_S = 240  # what a start may take on a busy host; no test asserts on it


PORTS = range(20_000, 32_768)  # below those that the system gives to whoever asks for any
PRIME = 7919  # processes with neighbouring ids begin far apart
_drawn = itertools.count(PRIME * os.getpid())


def free_port() -> int:
    """A port that nobody listens on, and that no other test is given before its server does.

    Each worker of pytest-xdist has ports of its own, among which every process begins at another one and counts up.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    index = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    mine = PORTS[index::count]
    for _ in mine:
        port = mine[next(_drawn) % len(mine)]
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"expected a free port of {mine}, got none")


def descendants(pid: int) -> set[int]:
    """The process ids below a process."""
    found: set[int] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                found |= {child} | descendants(child)
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def resident_kib(pid: int) -> int:
    """The memory that a process holds; 0 where it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1])
    return 0


def memory_kib(server: "RunningServer") -> dict[str, int]:
    """The largest memory of each kind of process of a server."""
    held: dict[str, int] = {}
    for pid in descendants(server.process.pid):
        held[title(pid)] = max(held.get(title(pid), 0), resident_kib(pid))
    return {name.removeprefix(TITLE): size for name, size in held.items() if name.startswith(TITLE)}


def title(pid: int) -> str:
    """What `ps` shows of a process; nothing where it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0].strip()
    return ""


class RunningServer:
    """`python -m service` as a process of its own, with its output in a file."""

    program: ClassVar[tuple[str, ...]] = ("-m", "service")

    def __init__(self, log: Path, *arguments: str, **environment: str) -> None:
        if "--port" not in arguments:
            arguments = ("--port", str(free_port()), *arguments)
        self.port = int(arguments[arguments.index("--port") + 1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self._key = environment.get("MLP_API_KEY")
        self.ready_ns = 0  # by the clock that files have; set by `wait_ready`
        ours = ("MLP_", "TRITON_", "TORCHINDUCTOR_")  # a compilation in this process sets the last
        clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command(arguments),
                cwd=ROOT,
                env=clean | environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def command(self, arguments: Sequence[str]) -> list[str]:
        """What starts it."""
        return [sys.executable, *self.program, *arguments]

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < limit, f"still waiting after {START_LIMIT_S} s:\n{self.output}"
            time.sleep(0.02)

    def wait_ready(self) -> Self:
        self.wait_until(lambda: "\nready " in self.output)
        self.ready_ns = time.time_ns()
        return self

    def get(self, path: str, **options: Any) -> httpx.Response:
        """What it answers over a connection of its own, as `post` and `put`; httpx's own 5 s are few on a busy host."""
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **options)

    def put(self, path: str, **options: Any) -> httpx.Response:
        return httpx.put(self.url + path, timeout=60, **options)

    def answers(self, path: str, status: int) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return self.get(path).status_code == status
        return False

    def is_listening(self) -> bool:
        """Whether the port takes connections."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=5):
            return True
        return False

    def pids_of(self, role: str) -> list[int]:
        """The processes whose title names the role, the oldest first."""
        return sorted(pid for pid in descendants(self.process.pid) if title(pid) == TITLE + role)

    def pid_of(self, role: str) -> int:
        """The one process whose title names the role."""
        (pid,) = self.pids_of(role)
        return pid

    def metric(self, name: str, **labels: str) -> float:
        """The value that `/metrics` shows now, the sum of all that have these labels."""
        return sum(value for found, has, value in self._samples() if found == name and labels.items() <= has.items())

    def accepted(self) -> float:
        """How many requests have been accepted so far, whether they are answered, abandoned or neither yet."""
        counted = ("mlp_inflight_requests", "mlp_requests_total", "mlp_abandoned_total")
        return sum(value for found, _, value in self._samples() if found in counted)

    def answers_together(
        self, calls: Sequence[Callable[[], httpx.Response]], until: Callable[[], bool] | None = None
    ) -> list[httpx.Response]:
        """Make inference calls side by side, with the workers stopped until all are accepted, or until more is so."""
        replies: dict[int, httpx.Response] = {}

        def make(index: int) -> None:
            replies[index] = calls[index]()

        with self.all_stopped("worker"):
            before = self.accepted()
            threads = [threading.Thread(target=make, args=(index,)) for index in range(len(calls))]
            for thread in threads:
                thread.start()
            self.wait_until(until or (lambda: self.accepted() == before + len(calls)))
        for thread in threads:
            thread.join()
        return [replies[index] for index in range(len(calls))]

    def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        key = {"x-api-key": os.fsencode(self._key).decode("latin-1")} if self._key else {}
        ask = urllib.request.Request(self.url + "/metrics", headers=key)
        with urllib.request.urlopen(ask, timeout=60) as reply:  # quicker than httpx to set up
            families = text_string_to_metric_families(reply.read().decode())
            return [(each.name, each.labels, float(each.value)) for family in families for each in family.samples]

    @contextlib.contextmanager
    def stopped(self, role: str) -> Iterator[int]:
        """Stop the one process with this role meanwhile, so that what waits for it waits for certain."""
        with self.all_stopped(role) as (pid,):
            yield pid

    @contextlib.contextmanager
    def all_stopped(self, role: str) -> Iterator[list[int]]:
        """Stop every process with this role meanwhile."""
        pids = self.pids_of(role)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield pids
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def wait_exit(self) -> int:
        return self.process.wait(timeout=60)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.wait_exit()

    def end(self) -> None:
        """Stop it in order, and whatever is left by force."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.stop()
        left = descendants(self.process.pid) | {self.process.pid}
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class HeldServer(RunningServer):
    """A server whose workers wait when told, as held_server.py says; HOLD has to be set."""

    program = ("-m", "tests.service.held_server")


class PlantedServer(RunningServer):
    """A server whose fused backend is made faulty by what stands in a file."""

    program = ("-m", "tests.service.rollout.planted_server")

    def __init__(self, directory: Path, *arguments: str) -> None:
        self._plant = directory / "planted"
        super().__init__(directory / "server.log", *arguments, PLANTED=str(self._plant))

    def plant(self, fault: str) -> None:
        """Make it faulty at once; "" heals it."""
        self._plant.with_suffix(".new").write_text(fault)
        self._plant.with_suffix(".new").rename(self._plant)

    def state(self) -> dict[str, str]:
        """What `GET /backend` says of fused, from a connection of its own."""
        state: dict[str, str] = self.get("/backend").json()["backends"]["fused"]
        return state

    def put_back(self, default: str = "fused") -> httpx.Response:
        """Put fused back once each answer has its shadow: one that is pending by then cannot take it out again."""
        self.wait_until(lambda: self.metric("mlp_inflight_requests") == 0)
        return self.put("/backend", json={"default": default})

    def fallbacks(self, reason: str) -> float:
        return self.metric("mlp_backend_fallbacks_total", backend="fused", reason=reason)


def talk(port: int, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """Send bytes over a connection of their own and return all that comes until the server closes it.

    A pause after each piece lets it be read by itself; a test has to hold as well where it is not.
    """
    reply = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        while data := connection.recv(65536):
            reply += data
    return reply


def answer(port: int, *pieces: bytes) -> bytes:
    """Return what `talk` does; where an impatient server let the connection go before it got any, talk again."""
    for _ in range(20):
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            if reply := talk(port, *pieces):
                return reply
    return b""


Start = Callable[..., RunningServer]
