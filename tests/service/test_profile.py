"""The profile of a request's way through the server's own code."""

import asyncio
import json
from pathlib import Path

import pytest

from models.config import ModelConfig
from models.directory import resolve
from models.engine import load_engine
from service import profile
from service.profile import BACKEND, CONNECTIONS, STAGES, WIRES, Clock, main
from service.settings import BATCH_ROWS, Settings

RESULT = Path(__file__).parents[2] / "docs/results/request-path.json"


class Ticks:
    """A clock that goes on by one each time it is looked at, and by as much as it is told."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        self.now += 1
        return self.now


class Nested:
    def __init__(self, ticks: Ticks) -> None:
        self.ticks = ticks

    def outer(self) -> int:
        self.ticks.now += 100
        return self.inner() + self.inner()

    def inner(self) -> int:
        self.ticks.now += 1000
        return self.ticks.now


def test_a_part_is_not_charged_for_the_parts_that_it_calls() -> None:
    ticks = Ticks()
    nested, clock = Nested(ticks), Clock(ticks)
    clock.time(nested, "outer", "outer")
    clock.time(nested, "inner", "inner")
    nested.outer()
    assert clock.spent_ns == {"outer": 100 + 3, "inner": 2 * 1001}  # a look is a tick, of the part it is taken in


@pytest.mark.parametrize("wire", WIRES)
def test_the_parts_are_the_whole_turn_but_for_the_driving(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in {"ROUNDS": 2, "TURNS": 3, "WARM_UP_TURNS": 2}.items():
        monkeypatch.setattr(profile, name, count)
    directory = resolve("digits")
    engine = load_engine(directory, backends=(BACKEND,))
    engine.warm_up(CONNECTIONS)
    driven = CONNECTIONS + 2  # calls from outside: each connection's, the worker's, the link's
    rounds = asyncio.run(profile.measure(wire, engine, ModelConfig.load(directory), Ticks()))
    assert len(rounds) == 2
    for each in rounds:
        assert all(each[stage] > 0 for stage in STAGES)
        ticks = {name: round(us * 1000 * CONNECTIONS) for name, us in each.items()}
        assert ticks["turn"] == sum(ticks[stage] for stage in STAGES) + driven + 1


def test_the_document_tells_what_was_measured_whatever_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in {"ROUNDS": 2, "TURNS": 3, "WARM_UP_TURNS": 2}.items():
        monkeypatch.setattr(profile, name, count)
    monkeypatch.setenv("MLP_HOLD_SHARE", "0.25")
    monkeypatch.setenv("MLP_WORKERS", "many")
    path = tmp_path / "request-path.json"
    assert main(["--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert (document["backend"], document["implementation"]) == ("fused", "onednn")
    assert document["settings"] == {
        "model": "digits",
        "max_batch_rows": BATCH_ROWS["cpu"],
        "timeout_s": 30.0,
        "spin_us": 0,
        "hold_share": Settings.model_fields["hold_share"].default,
    }
    assert [*document["wires"]] == [*WIRES]
    for wire in document["wires"].values():
        assert [*wire] == [*STAGES, "total", "turn"]
        for figure in ("median", "min", "max"):
            assert 0 < wire["total"][figure] <= wire["turn"][figure]


def test_the_committed_profile_has_the_parts_that_are_measured() -> None:
    document = json.loads(RESULT.read_text())
    assert [*document["wires"]["json"]] == [*STAGES, "total", "turn"]
    assert document["implementation"]
    assert document["settings"]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(tmp_path / "no" / "such.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
