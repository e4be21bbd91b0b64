"""Every command of the documents is run: as it stands, but for what tests/shrink.py makes small."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtests.evidence import read
from service.settings import load
from tests.loadtests.commands.test_compare import ON_ONE_CORE
from tests.reader import COMMANDS, LINES, PAGES, STOP, Reader, blocks_of, readers
from tests.service.running_server import ROOT, RunningServer
from tests.shrink import name_of
from tests.stand_ins import Cluster, Engine

TUTORIAL, OPERATING, BENCHMARKING = "docs/tutorial.md", "docs/operating.md", "docs/benchmarking.md"
ROLLOUT = 'make serve ARGS="--default-backend eager --canary fused=0.05 --shadow-rate 0.01 --max-drift 0.02"'
CHECK = ".venv/bin/python -m kernels check"
(CORES,) = (line for line in COMMANDS[BENCHMARKING] if " --server-cpus " in line)

DOCKERFILE = (ROOT / "Dockerfile").read_text()
DOCKER = [
    *(line for line in LINES if line.startswith("docker ")),
    *re.findall(r"^#   (docker .*)$", DOCKERFILE, re.MULTILINE),
]
KUBECTL = [line for line in LINES if line.startswith("kubectl ")]
# What is not typed again where it stands, since a test of another page, or of its own, runs it as well.
ELSEWHERE = {
    ("README.md", "make serve"): TUTORIAL,
    ("README.md", ROLLOUT): OPERATING,
    (BENCHMARKING, CHECK): "tests/kernels/test_checking.py",
    (BENCHMARKING, CORES): "tests/loadtests/commands/test_compare.py",
} | {(page, line): "below" for page, found in COMMANDS.items() for line in found if line in (*DOCKER, *KUBECTL)}


def left_out(page: str) -> list[str]:
    return [line for of, line in ELSEWHERE if of == page]


NEEDS_CURL = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
NEEDS_DOCKER = pytest.mark.skipif(shutil.which("docker") is None, reason="there is no docker here")
NEEDS_KUBECTL = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")


@pytest.fixture
def reader(tmp_path: Path, small_roof: None) -> Iterator[Reader]:
    yield from readers(tmp_path)


def printed(page: dict[str, str], containing: str) -> str:
    """What the one command of a page with a text in it printed."""
    (found,) = [text for line, text in page.items() if containing in line]
    return found


def test_every_page_with_commands_is_followed() -> None:
    assert set(COMMANDS) == {"README.md", OPERATING, BENCHMARKING, TUTORIAL}


def test_the_sentence_that_ends_the_readers_server_is_on_a_page() -> None:
    blocks = blocks_of((ROOT / TUTORIAL).read_text())
    assert [STOP in block.prose for block in blocks].count(True) == 1


def test_a_command_that_is_left_out_on_one_page_is_run_elsewhere() -> None:
    for (page, line), place in ELSEWHERE.items():
        assert line in COMMANDS[page]
        if place in COMMANDS:
            assert line in COMMANDS[place]
            assert (place, line) not in ELSEWHERE
    assert 'main(["check", ' in (ROOT / ELSEWHERE[BENCHMARKING, CHECK]).read_text()
    flag, cores = ON_ONE_CORE  # of the test there
    assert cores.isdigit()
    assert f" {flag} " in CORES


@pytest.mark.slow
@NEEDS_CURL
def test_the_tutorial_goes_from_a_server_to_a_report(reader: Reader) -> None:
    page = reader.follow(TUTORIAL)
    assert "\nready " in page["make serve"]
    reply, backends = (json.loads(text) for line, text in page.items() if line.startswith("curl "))
    assert (reply["labels"], reply["backend"], reply["implementation"]) == ("0", "fused", "onednn")
    assert {"queue_ms", "compute_ms"} <= set(reply["timing"])
    assert backends["default"] == "fused"
    assert "\nparameters " in printed(page, "models inspect")
    assert "eager / it" in printed(page, "models bench")  # the ratio that the page tells to read
    assert "products" in printed(page, "models profile")
    assert "out/tutorial/report.html" in printed(page, "loadtests report")
    evidence = read(reader.folder / "out/tutorial/compare.json")
    assert (evidence.model, list(evidence.backends)) == ("mine", ["eager", "fused"])
    assert (reader.folder / "out/tutorial/report.html").stat().st_size > 0


@pytest.mark.slow
@NEEDS_CURL
def test_the_readmes_commands_do_what_it_says(reader: Reader, server: RunningServer) -> None:
    reader.server = server
    page = reader.follow("README.md", but=left_out("README.md"))
    (shown,) = re.findall(r"^(\{\"outputs\".*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    reply = printed(page, "curl ")
    assert re.findall(r'"(\w+)":', reply) == re.findall(r'"(\w+)":', shown)
    same = '"labels":"0","backend":"fused","implementation":"onednn"'
    assert same in reply
    assert same in shown
    assert "out/theirs: " in printed(page, "models import")
    assert "Aggregated" in printed(page, "locust")
    assert read(reader.folder / "out/compare/compare.json").rows == 16
    document = json.loads((reader.folder / "out/spike/scenario.json").read_text())
    assert document["model"] == "mine"
    assert [run["errors"] for run in document["runs"]] == [{}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of PyTorch's own compiler
def test_the_benchmarking_page_goes_from_a_guess_to_a_load_from_elsewhere(reader: Reader) -> None:
    page = reader.follow(BENCHMARKING, but=left_out(BENCHMARKING))
    assert "ridge" in printed(page, "kernels roof")
    assert "compiled (inductor), 64 rows" in printed(page, "--rows 64 --backends compiled,fused")
    files = {path.name for path in (reader.folder / "out").iterdir()}
    assert {"roof.json", "eager.png", "eager.json", "bench.json"} <= files
    assert "out/compare/report.html" in printed(page, "loadtests report")
    assert read(reader.folder / "out/compare/compare.json").conditions["processes"] == 2
    assert [worker.wait(60) for worker in reader.workers] == [0]


@pytest.mark.slow
@NEEDS_CURL
def test_the_rollouts_commands_do_what_the_page_says(reader: Reader) -> None:
    page = reader.follow(OPERATING, but=left_out(OPERATING))
    first, metrics, raised, switched, back, mended = (text for line, text in page.items() if line.startswith("curl "))
    assert "mlp_shadow_drift" in metrics
    assert "mlp_request_seconds" in metrics
    states = [json.loads(each) for each in (first, raised, switched, back, mended)]
    assert [each["default"] for each in states] == ["eager", "eager", "fused", "eager", "eager"]
    assert [each["canary"].get("fused", 0) for each in states] == [0.05, 0.5, 0, 0, 0.05]


def docker_of(line: str) -> tuple[list[list[str]], list[list[str]]]:
    """The words of each `docker build` and of each `docker run` of a line."""
    commands = [shlex.split(each) for each in line.split(" && ")]
    return [words for words in commands if words[1] == "build"], [words for words in commands if words[1] == "run"]


def after(words: list[str], flag: str) -> list[str]:
    """What stands behind each of these flags."""
    return [words[place + 1] for place, word in enumerate(words) if word == flag]


@pytest.mark.parametrize("line", DOCKER)
def test_what_docker_is_told_is_what_the_dockerfile_and_the_server_take(line: str) -> None:
    builds, runs = docker_of(line)
    for words in builds:
        for argument in after(words, "--build-arg"):
            assert f"ARG {argument.partition('=')[0]}" in DOCKERFILE
    for words in runs:
        (image,) = [place for place, word in enumerate(words) if word.startswith("fused-mlp-server")]
        load(words[image + 1 :])


@NEEDS_DOCKER
@pytest.mark.parametrize("line", DOCKER)
def test_docker_asks_its_engine_for_what_the_line_says(line: str, tmp_path: Path) -> None:
    engine, index = Engine(), "http://127.0.0.1:9/an-index"
    environment = engine.environment(tmp_path) | {"CPU_INDEX": index}
    with engine.serving():
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, env=environment)
    builds, runs = docker_of(line)
    assert done.returncode == (125 if runs else 0), done.stderr
    assert (Engine.REFUSAL in done.stderr) == bool(runs)
    copied = {name for each in re.findall(r"^COPY (?!--)(.*) \S+$", DOCKERFILE, re.MULTILINE) for name in each.split()}
    for words, built in zip(builds, engine.builds, strict=True):
        assert [built["tag"]] == after(words, "-t")
        told = (each.replace("$CPU_INDEX", index).split("=") for each in after(words, "--build-arg"))
        assert built["arguments"] == dict(told)
        assert copied | {"Dockerfile"} <= set(built["files"])
        assert not [name for name in built["files"] if name.startswith(("tests", ".git", "out"))]
    for words, asked in zip(runs, engine.containers, strict=True):
        host = asked["HostConfig"]
        assert asked["Cmd"] == words[words.index(asked["Image"]) + 1 :]
        assert host["PortBindings"] == {"8000/tcp": [{"HostIp": "", "HostPort": "8000"}]}
        # Docker's client keeps volumes in a map, whose order changes from run to run.
        assert sorted(host["Binds"] or []) == sorted(each.replace("$PWD", str(ROOT)) for each in after(words, "-v"))
        assert [each["Count"] for each in host["DeviceRequests"] or []] == [-1] * words.count("--gpus")
        assert host["ReadonlyRootfs"] == ("--read-only" in words)
        assert sorted(host.get("Tmpfs", {})) == sorted(after(words, "--tmpfs"))
        assert host["NanoCpus"] == sum(int(each) * 10**9 for each in after(words, "--cpus"))


@NEEDS_KUBECTL
@pytest.mark.parametrize("line", KUBECTL)
def test_kubectl_has_a_cluster_create_what_the_line_names(line: str, tmp_path: Path) -> None:
    cluster = Cluster()
    with cluster.serving():
        done = subprocess.run(
            shlex.split(line), capture_output=True, text=True, cwd=ROOT, env=cluster.environment(tmp_path)
        )
    assert (done.returncode, done.stderr) == (0, "")
    kinds = re.findall(r"^kind: (\w+)$", (ROOT / line.split()[-1]).read_text(), re.MULTILINE)
    assert [each["kind"] for each in cluster.created] == kinds
    assert done.stdout.count(" created\n") == len(kinds) > 0
    assert {each["metadata"]["namespace"] for each in cluster.created} == {"default"}


@NEEDS_KUBECTL
def test_a_manifest_with_a_field_that_there_is_not_is_not_applied(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text((ROOT / "deploy/kubernetes.yaml").read_text().replace("httpGet: {path:", "httpGet: {route:"))
    cluster = Cluster()
    with cluster.serving():
        command = ["kubectl", "apply", "-f", str(wrong)]
        done = subprocess.run(command, capture_output=True, text=True, env=cluster.environment(tmp_path))
    assert done.returncode == 1
    assert "route" in done.stderr
    assert [each["kind"] for each in cluster.created] == ["Service", "HorizontalPodAutoscaler"]


# A program that a sentence names, with its subcommand where it has one, and the flags that stand behind it.
PROGRAM = re.compile(r"`(?:[A-Z_]+=\S+ )?(?:\.venv/bin/)?python (-m [\w.]+\w|tests/\S+\.py)([^`]*)`")
NAMED: dict[tuple[str, ...], set[str]] = {}
for path in [*(ROOT / page for page in PAGES), *sorted((ROOT / "examples").iterdir())]:
    for program, rest in PROGRAM.findall(path.read_text()):
        words = rest.partition(" -- ")[0].split()
        inner = words[:1] if program in ("-m models", "-m kernels", "-m loadtests") else []
        flags = {word for word in words if word.startswith("--") and word != "--help"}
        NAMED.setdefault((*program.split(), *inner), set()).update(flags)

# What no page has a line of, and the tests that run it.
RUN_BY = {
    "examples.fuse_minilm": "tests/examples/test_fuse_minilm.py",
    "kernels aot": "tests/kernels/aot/test_table.py",
    "kernels bench": "tests/kernels/test_bench.py",
    "kernels tune": "tests/kernels/test_tuning.py",
    "loadtests peers": "tests/loadtests/peers/test_peer_comparison.py",
    "models batch-invariance": "tests/models/commands/test_batch_invariance.py",
    "service.profile": "tests/service/test_profile.py",
    "tests/service/chaos/fuzz.py": "tests/service/chaos/test_fuzz.py",
    "tests/service/chaos/soak.py": "tests/service/chaos/test_soak.py",
}
RUN_BY_MAKE = ("service",)  # by every `make serve`
NOT_RUN = ("docs.screenshots", "models")  # what takes the pictures; and a sentence about all of them


def test_every_program_that_a_sentence_names_is_run_on_a_page_or_by_a_test_of_its_own() -> None:
    named = {" ".join(program).removeprefix("-m ") for program in NAMED}
    assert {"models bench", "service.profile", "tests/service/chaos/soak.py"} <= named
    typed = {name_of(shlex.split(line)) for line in LINES}
    assert named - typed == {*RUN_BY, *RUN_BY_MAKE, *NOT_RUN}
    for name, file in RUN_BY.items():
        leaf = re.split(r"[ ./]", name.removesuffix(".py"))[-1]
        assert re.search(rf'"{leaf}"|\bimport .*\b{leaf}\b|from [\w.]*\b{leaf} import', (ROOT / file).read_text()), name


@pytest.mark.slow
@pytest.mark.parametrize("program", [program for program, flags in NAMED.items() if flags], ids=" ".join)
def test_a_program_has_the_flags_that_a_sentence_gives_it(program: tuple[str, ...]) -> None:
    environment = os.environ | {"PYTHONPATH": "."}
    command = [sys.executable, *program, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    assert {flag for flag in NAMED[program] if flag not in done.stdout} == set()


def test_what_takes_the_pages_pictures_is_there() -> None:
    assert callable(importlib.import_module("docs.screenshots").main)  # it takes no flags, and starts at once
