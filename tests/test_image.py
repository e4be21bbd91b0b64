"""The image, built and run by the lines that the pages and the Dockerfile have: `make image-check`, where Docker runs.

BASE_IMAGE names another base than the Dockerfile's, and CPU_INDEX is what docs/operating.md says. The lines for a GPU
are run where there is one: elsewhere tests/test_commands.py shows them to a stand-in for Docker's engine alone.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.made_model import write_made_model
from tests.reader import Developer
from tests.service.running_server import START_LIMIT_S, free_port
from tests.test_commands import DOCKER, after, docker_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif("IMAGE_CHECK" not in os.environ, reason="a build takes minutes: make image-check runs it"),
]
HAS_GPU = Path("/dev/nvidiactl").exists()
NEEDS_GPU = pytest.mark.skipif(
    not HAS_GPU, reason="there is no GPU here: tests/test_commands.py shows this line to a stand-in"
)
OURS = f"image-check-{os.getpid()}"  # with which the names of all that is made here begin
WIDTHS = {"digits": 64, "mine": 8}
HEALTHY = "healthy"


def of_lines(kind: int) -> list[Any]:
    """The lines that build, or those that run, with what they need."""
    chosen = [line for line in dict.fromkeys(DOCKER) if docker_of(line)[kind]]
    return [pytest.param(line, marks=NEEDS_GPU if "cuda" in line else (), id=line) for line in chosen]


BUILDS, RUNS = of_lines(0), of_lines(1)
(READ_ONLY,) = [line for line in DOCKER if "--read-only" in line]


class Container:
    """What a `docker run` of a page has started."""

    def __init__(self, docker: "Docker", line: str, name: str, port: int) -> None:
        self.docker, self.name, self.url = docker, name, f"http://127.0.0.1:{port}"
        self.log = docker.folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(["bash", "-c", line], cwd=docker.folder, stdout=log, stderr=log)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_ready(self) -> None:
        self.wait_until(lambda: "\nready " in self.output)

    def wait_until(self, condition: Any) -> None:
        limit = time.monotonic() + START_LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.output
            assert time.monotonic() < limit, f"still waiting after {START_LIMIT_S} s:\n{self.output}"
            time.sleep(0.2)

    def inspect(self) -> Any:
        (found,) = json.loads(self.docker.ask("inspect", self.name))
        return found

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", "exec", self.name, *command], capture_output=True, text=True, timeout=60)

    def is_healthy(self) -> bool:
        """What Docker's health check finds now."""
        kind, *command = self.inspect()["Config"]["Healthcheck"]["Test"]
        assert kind == "CMD"
        return self.execute(*command).returncode == 0

    def end(self) -> None:
        subprocess.run(["docker", "rm", "--force", self.name], capture_output=True)
        self.process.wait()


class Docker:
    """Types lines for Docker in a copy of the project, with names and a port of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = Developer(folder).folder
        (self.folder / "out").mkdir()
        write_made_model(self.folder / "out", "mine", dim=WIDTHS["mine"], hidden=16, depth=1)

    def ask(self, *words: str) -> str:
        """Return what a command of Docker printed."""
        done = subprocess.run(["docker", *words], capture_output=True, text=True)
        assert done.returncode == 0, f"docker {shlex.join(words)}\n{done.stderr}"
        return done.stdout

    def here(self, line: str, name: str = "", port: int = 0) -> str:
        """Return a line with the names that hold here."""
        base = os.environ.get("BASE_IMAGE")
        places = {
            "docker build": f"docker build --label {OURS}" + (f" --build-arg BASE_IMAGE={base}" if base else ""),
            "docker run": f"docker run --name {name}",
            "fused-mlp-server": OURS,
            "mlp-cache": f"{OURS}-cache",
            "-p 8000:8000": f"-p 127.0.0.1:{port}:8000",
            "PIP_EXTRA_INDEX_URL=... ": 'PIP_EXTRA_INDEX_URL="$CPU_INDEX" ',
        }
        for there, here in places.items():
            line = line.replace(there, here)
        return line

    def build(self, line: str) -> subprocess.CompletedProcess[str]:
        """Type what a line has before what it runs."""
        (build,) = [part for part in line.split(" && ") if part.startswith("docker build ")]
        return subprocess.run(["bash", "-c", self.here(build)], cwd=self.folder, capture_output=True, text=True)

    @contextlib.contextmanager
    def running(self, line: str) -> Iterator[Container]:
        """Type a line; its container ends with it."""
        port = free_port()
        name = f"{OURS}-{port}"
        container = Container(self, self.here(line, name, port), name, port)
        try:
            yield container
        finally:
            container.end()

    def unnamed(self) -> set[str]:
        """The images of the builds here that have lost their name to a later one."""
        filters = ("--filter", "dangling=true", "--filter", f"label={OURS}")
        return set(self.ask("images", "--quiet", "--no-trunc", *filters).split())

    def end(self) -> None:
        """Remove what was made."""
        subprocess.run(["docker", "volume", "rm", f"{OURS}-cache"], capture_output=True)
        tags = {self.here(tag) for line in DOCKER for words in docker_of(line)[0] for tag in after(words, "-t")}
        subprocess.run(["docker", "image", "rm", *tags], capture_output=True)
        while left := self.unnamed():
            if subprocess.run(["docker", "image", "rm", *left], capture_output=True).returncode:
                break


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    docker = Docker(tmp_path_factory.mktemp("docker"))
    yield docker
    docker.end()


@pytest.fixture(scope="module")
def built(docker: Docker) -> dict[str, subprocess.CompletedProcess[str]]:
    """What each build said; those of an image that is there are quick."""
    lines = [line for line in DOCKER if docker_of(line)[0] and (HAS_GPU or "cuda" not in line)]
    return {line: docker.build(line) for line in lines}


@pytest.mark.parametrize("line", BUILDS)
def test_a_line_builds_an_image_with_the_torch_it_asks_for(
    line: str, docker: Docker, built: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    assert built[line].returncode == 0, built[line].stderr + built[line].stdout[-4000:]
    (words,) = docker_of(line)[0]
    (tag,) = after(words, "-t")
    version = docker.ask(
        "run", "--rm", "--entrypoint", "python3", docker.here(tag), "-c", "import torch; print(torch.__version__)"
    )
    assert ("+cpu" in version) or "TORCH_BUILD=cpu" not in words
    index = os.environ.get("CPU_INDEX")
    assert not index or index not in docker.ask("history", "--no-trunc", docker.here(tag))


def test_a_build_of_torch_that_is_nowhere_fails(docker: Docker, built: object) -> None:
    done = docker.build("docker build --force-rm -t fused-mlp-server:none --build-arg TORCH_BUILD=none .")
    assert done.returncode != 0
    assert re.search(r"torch==[\d.]+\+none", done.stdout + done.stderr)


@pytest.mark.parametrize("line", RUNS)
def test_a_line_runs_a_server_that_keeps_to_what_the_page_says(line: str, docker: Docker, built: object) -> None:
    (words,) = docker_of(line)[1]
    model = "mine" if "/models/mine" in words else "digits"
    with docker.running(line) as container:
        container.wait_ready()
        reply = httpx.post(f"{container.url}/predict", json={"inputs": [0.5] * WIDTHS[model]}, timeout=60)
        assert (reply.status_code, reply.headers["x-backend"]) == (200, "fused"), reply.text
        assert re.findall(r"^backend +(\w+) ", container.output, re.MULTILINE) == ["eager", "compiled", "fused"]
        assert container.execute("id", "-u").stdout == "10001\n"
        written = [change.split(maxsplit=1) for change in docker.ask("diff", container.name).splitlines()]
        assert [path for kind, path in written if not re.match(r"/(cache|tmp|models/mine)\b|/models$", path)] == []
        touched = {path: container.execute("touch", f"{path}/new").returncode for path in ("/app", "/home/server")}
        assert touched["/app"] != 0
        assert (touched["/home/server"] != 0) == ("--read-only" in words)
        container.wait_until(lambda: container.inspect()["State"]["Health"]["Status"] == HEALTHY)
        docker.ask("stop", container.name)  # kills what is not over after 10 s, whose status is then 137
        assert container.process.wait(60) == 0, container.output


def test_the_threads_are_counted_from_cpus_and_healthy_is_ready(docker: Docker, built: object) -> None:
    with docker.running(READ_ONLY.replace("--cpus 2", "--cpus 1")) as container:
        container.wait_until(lambda: container.process.poll() is None and container.execute("true").returncode == 0)
        assert not container.is_healthy()
        container.wait_ready()
        assert " of 1 thread(s)" in container.output
        assert container.is_healthy()
        docker.ask("kill", "--signal", "STOP", container.name)  # who starts a lost worker anew
        find = "import os, pathlib\nfor path in pathlib.Path('/proc').glob('[0-9]*/cmdline'):\n"
        find += "    if path.read_text().startswith('fused-mlp-server: worker'): os.kill(int(path.parent.name), 9)"
        assert container.execute("python3", "-c", find).returncode == 0
        container.wait_until(lambda: not container.is_healthy())
        docker.ask("kill", "--signal", "CONT", container.name)
        container.wait_until(container.is_healthy)
        docker.ask("stop", container.name)
        assert container.process.wait(60) == 0, container.output


@pytest.mark.parametrize("way", ["-e MLP_PORT=9000 IMAGE", "IMAGE --port 9000", "IMAGE --port=9000"])
def test_the_health_check_finds_the_port(way: str, docker: Docker, built: object) -> None:
    line = f"docker run --rm -e MLP_BACKENDS=eager {way.replace('IMAGE', 'fused-mlp-server:cpu')}"
    with docker.running(line) as container:
        container.wait_ready()
        assert "http://127.0.0.1:9000" in container.output
        assert container.is_healthy()
