"""The profile of a request's way through the server's own code."""

import json
from pathlib import Path

import pytest

from service.profile import STAGES, WIRES, Clock, main

RESULT = Path(__file__).parents[2] / "docs/results/request-path.json"


class Nested:
    def outer(self) -> int:
        return self.inner() + 1

    def inner(self) -> int:
        return sum(range(200_000))


def test_a_part_is_not_charged_for_the_parts_that_it_calls() -> None:
    nested, clock = Nested(), Clock()
    clock.time(nested, "outer", "outer")
    clock.time(nested, "inner", "inner")
    nested.outer()
    assert 0 < clock.spent_ns["outer"] < clock.spent_ns["inner"]


@pytest.mark.slow
def test_every_part_of_the_way_is_measured_and_they_add_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "request-path.json"
    assert main(["--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert [*document["wires"]] == [*WIRES]
    for wire in document["wires"].values():
        assert all(wire[stage]["min"] > 0 for stage in STAGES)
        assert wire["total"]["min"] >= sum(wire[stage]["min"] for stage in STAGES) - 0.01


def test_the_committed_profile_has_the_parts_that_are_measured() -> None:
    document = json.loads(RESULT.read_text())
    assert [*document["wires"]["json"]] == [*STAGES, "total"]


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", str(tmp_path / "no" / "such.json")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
