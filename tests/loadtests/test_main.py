import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtests", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("overhead", "--requests", "5"), "--requests: expected a whole number of at least 100, got '5'"),
        (("overhead", "--json", "/nowhere/at/all.json"), "--json /nowhere/at/all.json"),
        (("nothing",), "invalid choice: 'nothing'"),
    ],
    ids=["requests", "json", "command"],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(arguments: tuple[str, ...], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
