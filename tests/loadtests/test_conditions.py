import subprocess
from pathlib import Path
from types import ModuleType

import pytest

import kernels.conditions
import loadtests.conditions
from loadtests.conditions import RECORDS, recorded, told_commit


@pytest.mark.parametrize("flags", [["--key", "secret"], ["--key=secret"], ["--key", "--key"], ["--key="]], ids=str)
def test_the_command_is_kept_without_its_key(flags: list[str]) -> None:
    assert recorded(["compare", *flags, "--rows", "3"]) == ["python", "-m", "loadtests", "compare", "--rows", "3"]


@pytest.mark.parametrize("flags", [["--api-key", "secret"], ["--api-key=secret"], ["--api-k", "secret"]], ids=str)
def test_the_key_of_a_server_that_is_started_is_not_kept_either(flags: list[str]) -> None:
    assert recorded(["compare", "--", *flags, "--workers", "2"])[3:] == ["compare", "--", "--workers", "2"]


def test_changes_that_were_not_committed_are_told_in_words() -> None:
    assert told_commit("0123abc") == "0123abc"
    assert told_commit("0123abc+") == "0123abc with uncommitted changes"


@pytest.mark.parametrize("conditions", [loadtests.conditions, kernels.conditions], ids=lambda module: module.__name__)
def test_what_measurements_leave_behind_is_no_change_of_the_tree_and_all_else_is(
    conditions: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "ROOT", tmp_path)
    (tmp_path / "docs/results").mkdir(parents=True)
    for path in ("README.md", "docs/peers.md", "docs/results/compare.json", "code.py"):
        (tmp_path / path).write_text("before")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "Begin"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, timeout=30)
    name = conditions.commit()
    assert not name.endswith("+")
    for path in ("README.md", "docs/peers.md", "docs/results/compare.json", "docs/results/new.json"):
        (tmp_path / path).write_text("after")
    assert conditions.commit() == name
    (tmp_path / "code.py").write_text("after")
    assert conditions.commit() == f"{name}+"
    (tmp_path / "code.py").write_text("before")
    (tmp_path / "docs/other.md").write_text("new")
    assert conditions.commit() == f"{name}+"


def test_the_records_are_the_same_for_all_who_measure_and_are_there() -> None:
    assert kernels.conditions.RECORDS == RECORDS
    assert [path for path in RECORDS if not (loadtests.conditions.ROOT / path).exists()] == []
