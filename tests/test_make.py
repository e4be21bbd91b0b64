"""Every target of make that a page names does what it says, in a copy of the project; what has Docker do it is read."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.reader import COMMANDS, DONE, LINES, PAGES, PEERS, Developer
from tests.service.running_server import ROOT, Start
from tests.test_commands import CORES

pytestmark = pytest.mark.timeout(1200)  # a test has make do up to six things, each with a limit of its own

NAMED = {
    target
    for page in PAGES
    for target in re.findall(r"(?:^|`)make ((?:\.venv/)?[a-z][a-z/-]*)", (ROOT / page).read_text(), re.MULTILINE)
}
ELSEWHERE = {"serve": "reader.py", "audit": "test_audit.py"}  # which run these
NOT_MEASURED = {"aot.json", "onednn.json", "peers.json"}  # by `make bench`, of what has results
NEEDS_CORES = pytest.mark.skipif(
    not {0} < os.sched_getaffinity(0), reason="the server is given core 0, and its load another one: not both are here"
)
NEEDS_VENV = pytest.mark.skipif(
    importlib.util.find_spec("ensurepip") is None or not (Path(sysconfig.get_path("include")) / "Python.h").exists(),
    reason="python3-venv or python3-dev is not here: make would fetch them",
)
NEEDS_WRK = pytest.mark.skipif(shutil.which("wrk") is None, reason="there is no wrk here")
NEEDS_PEERS = pytest.mark.skipif(not PEERS.exists(), reason="the other servers are not set up: make .peers/stamp")
TESTS = """import pytest

def test_quick() -> None:
    pass

@pytest.mark.slow
def test_slow() -> None:
    raise OSError
"""


@pytest.fixture
def developer(tmp_path: Path) -> Developer:
    return Developer(tmp_path)


@pytest.mark.parametrize("target", sorted(NAMED))
def test_a_target_that_is_named_is_run_by_a_test(target: str) -> None:
    assert f'"{target}"' in (ROOT / "tests" / ELSEWHERE.get(target, "test_make.py")).read_text()


def dry_run(target: str) -> str:
    """What make would do for a target, with everything set up."""
    done = subprocess.run(["make", "-n", *DONE, target], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@NEEDS_VENV
def test_the_set_up_is_made_once_and_has_what_the_pins_say(developer: Developer) -> None:
    (developer.folder / ".venv").unlink()
    assert developer.make(".venv/bin/python", f"PYTHON={Path(sys.executable).resolve()}", done=()) == ""
    # What is there already is not fetched again.
    (packages,) = (developer.folder / ".venv").glob("lib/python3*/site-packages")
    (packages / "there.pth").write_text(sysconfig.get_path("purelib"))
    said = developer.make("setup-dev", done=())
    assert said.count("Setting up .venv") == 2
    assert "Nothing to be done" in developer.make("setup-dev", done=())
    (developer.folder / "requirements/dev.txt").touch()
    assert developer.make("setup-dev", done=()).count("Setting up .venv") == 1


@pytest.mark.slow
def test_the_whole_suite_has_what_its_quick_part_leaves_out_and_a_failure_fails_it(developer: Developer) -> None:
    (developer.folder / "tests/test_planted.py").write_text(TESTS)
    chosen = "ARGS=tests/test_planted.py --numprocesses 1"
    assert "1 failed, 1 passed in" in developer.make("test", chosen, status=2)
    assert "1 passed in" in developer.make("test-quick", chosen)


@pytest.mark.slow
def test_what_the_check_finds_is_mended_by_what_it_names(developer: Developer) -> None:
    if (ROOT / ".mypy_cache").exists():
        shutil.copytree(ROOT / ".mypy_cache", developer.folder / ".mypy_cache")
    module, readme = developer.folder / "kernels/planted.py", developer.folder / "README.md"
    module.write_text("import os\nx: int = ( 1 )\n")
    assert "kernels/planted.py" in developer.make("check", status=2)
    developer.make("format")
    assert module.read_text() == "x: int = 1\n"
    text = readme.read_text()
    readme.write_text(text.replace("| `--port` | `8000`", "| `--port` | `8001`"))
    assert "error: README.md and what it is generated from differ; run `make docs`" in developer.make("check", status=2)
    developer.make("docs")
    assert readme.read_text() == text
    developer.make("check")
    for planted, says in (('x: int = "1"\n', "Incompatible types"), ("import models\n\nx = models\n", "BROKEN")):
        module.write_text(planted)
        assert says in developer.make("check", status=2)


@pytest.mark.slow
@NEEDS_CORES
def test_bench_measures_every_result_and_renews_the_pages(developer: Developer) -> None:
    before = {path.name: path.read_bytes() for path in (ROOT / "docs/results").glob("*.json")}
    said = developer.measure("bench")
    stays = NOT_MEASURED | ({"saturation.json"} if shutil.which("wrk") is None else set())
    assert ("Without wrk" in said) == (shutil.which("wrk") is None)
    results = {name: (developer.folder / "docs/results" / name).read_bytes() for name in before}
    assert {name for name, data in results.items() if data == before[name]} == stays
    assert {name for name in before if (ROOT / "docs/results" / name).read_bytes() != before[name]} == set()
    for page, shows in (
        ("README.md", "Medians of 2 interleaved rounds"),
        ("docs/measurements.md", "Medians of 100 requests"),
    ):
        assert shows in (developer.folder / page).read_text()
        assert shows not in (ROOT / page).read_text()


@pytest.mark.slow
@NEEDS_WRK
@NEEDS_PEERS
def test_peers_measures_other_servers_and_renews_their_page(developer: Developer) -> None:
    developer.measure("peers")
    document = json.loads((developer.folder / "docs/results/peers.json").read_text())
    cells = [(each["server"], each["failure"]) for each in document["peers"]["cells"]]
    assert cells == [("ours", None), ("fastapi", None)]
    page = (developer.folder / "docs/peers.md").read_text()
    assert "Medians of 1 rounds of 1 s" in page
    assert page.count("| this server |") == 1


@pytest.mark.slow
@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="there is a GPU here, on which it takes 8 minutes")
def test_gpu_says_where_there_is_none_and_what_there_was_no_time_for(developer: Developer) -> None:
    python = "PYTHON=.venv/bin/python"
    assert "expected a CUDA or ROCm device" in developer.make("gpu", python, status=2)
    said = developer.make("gpu", python, "ARGS=--device cpu --out out/gpu --budget-s 0", status=2)
    assert "left out" in said
    assert (developer.folder / "out/gpu/gpu.md").exists()


@pytest.mark.slow
def test_loadtest_loads_a_running_server(developer: Developer, start: Start) -> None:
    (line,) = (line for line in LINES if " --headless " in line)
    assert dry_run("loadtest").split()[1:] == shlex.split(line.partition(" --headless ")[0])
    url = start("--backends", "fused").wait_ready().url
    assert "Aggregated" in developer.make("loadtest", f"ARGS=--host {url} --headless -u 1 -t 1s --tags fused")


def test_make_image_builds_as_the_readme_does() -> None:
    (line,) = (line for line in COMMANDS["README.md"] if line.startswith("docker build "))
    assert dry_run("image").split() == line.partition(" && ")[0].split()


def test_image_check_types_the_lines_for_docker() -> None:
    assert dry_run("image-check").split()[-1] == "tests/test_image.py"


def test_clean_leaves_the_sources_alone(developer: Developer) -> None:
    sources = {path.name for path in developer.folder.iterdir()} - {".venv"}
    for name in (".judges", ".peers", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", "out"):
        (developer.folder / name).mkdir()
    developer.make("clean")
    assert {path.name for path in developer.folder.iterdir()} == sources | {"out"}
    assert Path(sys.prefix).exists()  # .venv is a link here


MEASURING = re.compile(r"\.venv/bin/python -m ((?:models|loadtests) [^;|\n]*)")
# Runs each command line up to where the chosen command would start.
PARSE = """
import shlex, sys
from importlib import import_module
for line in sys.stdin:
    program, command, *_ = words = shlex.split(line)
    main = import_module(f"{program}.__main__")
    module = main.module_name(command) if program == "models" else command
    import_module(f"{program}.commands.{module}").run = lambda options: 0
    if main.main(words[1:]) != 0:
        sys.exit(line)
"""


@pytest.mark.slow
@pytest.mark.parametrize("source", ["peers", CORES], ids=["peers", "cores"])
def test_what_make_measures_with_and_what_runs_elsewhere_takes_its_flags(source: str) -> None:
    lines = re.findall(MEASURING, source if source == CORES else dry_run(source))
    assert lines
    done = subprocess.run(
        [sys.executable, "-c", PARSE], input="\n".join(lines), capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")
