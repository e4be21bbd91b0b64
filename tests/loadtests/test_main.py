import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loadtests import fork_server

ROOT = Path(__file__).parents[2]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run_loadtests(*arguments, environment=os.environ | environment)


@pytest.mark.slow
def test_the_overhead_is_measured_and_written_with_its_conditions(tmp_path: Path) -> None:
    file = tmp_path / "overhead.json"
    done = run("overhead", "--requests", "100", "--json", str(file))
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert [each["client"] for each in document["overhead"]] == ["raw socket", "http.client"]
    for each in document["overhead"]:
        assert 0 < each["ratio_min"] <= each["ratio"] <= each["ratio_max"]
        assert each["backend"] == "fused"
    assert {"processor", "cores", "python", "torch", "commit"} <= set(document["conditions"])


@pytest.mark.parametrize("command", [("compare",), ("scenario", "steady")], ids=["compare", "scenario"])
def test_a_flag_is_written_in_full_so_that_no_key_is_taken_for_something_else(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    done = run(*command, "--out", str(tmp_path), "--url", "http://127.0.0.1:1", "--ke", "secret")
    assert done.returncode == 2
    assert "unrecognized arguments: --ke" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [("compare",), ("scenario", "steady")], ids=["compare", "scenario"])
def test_the_help_of_a_command_has_its_defaults_and_no_key(command: tuple[str, ...]) -> None:
    done = run(*command, "--help", MLP_API_KEY="a-secret")
    assert done.returncode == 0
    said = " ".join(done.stdout.split())
    for default in (
        "rows in each request (default: 1)",
        "the most that the p99 may be (default: 50.0)",
        "(default: json)",
    ):
        assert default in said
    assert "[-- flags of the server that is started]" in said
    assert "None" not in said
    assert "a-secret" not in said


def test_an_error_of_a_command_is_one_line_that_names_its_help_and_what_is_missing() -> None:
    done = run("compare", "--rows", "3")
    assert done.returncode == 2
    expected = "error: the following arguments are required: --out (see python -m loadtests compare --help)\n"
    assert done.stderr == expected


@pytest.mark.parametrize("missing", ["psutil", "matplotlib", "locust"])
def test_a_package_that_is_not_installed_is_named_with_what_installs_it(missing: str) -> None:
    hidden = (
        f"import sys; sys.modules[{missing!r}] = None; import loadtests.__main__ as it; sys.exit(it.main(['compare']))"
    )
    done = subprocess.run([sys.executable, "-c", hidden], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"error: compare needs {missing}, which is not installed; run `make setup-dev`\n"


def test_a_report_of_nothing_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = run("report", str(tmp_path / "nothing"))
    assert (done.returncode, done.stderr) == (2, f"error: {tmp_path / 'nothing'}: no such file\n")
    (tmp_path / "bench.json").write_text("{}")
    done = run("report", str(tmp_path / "bench.json"))
    assert "got one without the field 'version'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("overhead", "--requests", "5"), "--requests: expected a whole number from 100 to 10000000, got '5'"),
        (("overhead", "--json", "/nowhere/at/all.json"), "--json /nowhere/at/all.json"),
        (("nothing",), "invalid choice: 'nothing'"),
    ],
    ids=["requests", "json", "command"],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "loadtests", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_an_interrupt_while_a_command_is_loaded_is_one_line() -> None:
    program = """
import sys
import loadtests.__main__ as it
def interrupted(name):
    raise KeyboardInterrupt
it.import_module = interrupted
sys.exit(it.main(["compare"]))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
