"""What a comparison measures, in which order and for how long; the tests of `compare` make such loads.

It is asked in a process of its own, since locust patches the standard library.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.service.running_server import ROOT

# Sends nothing: notes the loads, in each of which 16 requests a second are answered.
PROGRAM = """
import json, sys
from dataclasses import asdict, replace
from loadtests.measuring.comparison import Comparison, Plan
from tests.loadtests.made_evidence import compared
loads, made = [], compared()
class Noted:
    def run(self, load, number, is_search):
        loads.append(asdict(load) | {"round": number, "backend": load.kinds[0][0]})
        return replace(made.runs[0], backend=load.kinds[0][0], answered=80, seconds=5.0)
rates = json.loads(sys.argv[1])
Comparison(Noted(), made, Plan(1, [2], rates, False, 3, 5.0, 0.5, 64)).run()
print(json.dumps(loads))
"""


def noted(rates_per_s: list[float] | None) -> list[dict[str, Any]]:
    arguments = [sys.executable, "-c", PROGRAM, json.dumps(rates_per_s)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    loads: list[dict[str, Any]] = json.loads(done.stdout)
    return loads


@pytest.fixture(scope="module")
def loads() -> list[dict[str, Any]]:
    return noted(None)


def test_each_round_begins_with_another_backend(loads: list[dict[str, Any]]) -> None:
    for loop in ("closed", "open"):
        first_three = [
            [each["backend"] for each in loads if each["round"] == round_ and each["loop"] == loop][:3]
            for round_ in range(3)
        ]
        assert first_three == [
            ["eager", "compiled", "fused"],
            ["compiled", "fused", "eager"],
            ["fused", "eager", "compiled"],
        ]


def test_backends_get_the_same_arrivals_in_a_round_and_others_in_the_next(loads: list[dict[str, Any]]) -> None:
    seeds = {round_: {tuple(each["seed"]) for each in loads if each["round"] == round_} for round_ in range(3)}
    assert [len(each) for each in seeds.values()] == [1, 1, 1]
    assert len(set.union(*seeds.values())) == 3


def test_a_rate_of_few_requests_takes_longer_unless_somebody_gave_it(loads: list[dict[str, Any]]) -> None:
    seconds = {each["rate_per_s"]: each["seconds"] for each in loads if each["loop"] == "open"}
    assert seconds[4.0] == 20.0  # a quarter of what the closed loop reached: four times what was asked for
    assert seconds[12.0] == pytest.approx(200 / 12)
    assert {each["seconds"] for each in noted([4.0])} == {5.0}
