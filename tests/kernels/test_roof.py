import time

import pytest
import torch

from kernels.bench import elementwise_work, gated_linear_work, linear_work
from kernels.roof import Roof, Work, interleaved, timing

CPU = torch.device("cpu")


def test_the_floor_is_the_longer_of_moving_and_computing() -> None:
    roof = Roof(100.0, {torch.float32: 1000.0, torch.bfloat16: 4000.0})
    assert roof.floor_s(Work(200, 1000), torch.float32) == 2
    assert roof.floor_s(Work(200, 8000), torch.float32) == 8
    assert roof.floor_s(Work(200, 8000), torch.bfloat16) == 2


def test_a_timing_is_the_median_with_its_spread() -> None:
    assert timing([5.0, 1.0, 2.0, 3.0, 4.0, 100.0]) == (3.5, 2.0, 5.0, 6)
    with pytest.raises(ValueError, match="needs one repetition or more"):
        timing([])


def test_calls_are_timed_in_turn_after_two_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    clock = [0.0]

    def call(name: str, seconds: float) -> None:
        log.append(name)
        clock[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    calls = {"a": lambda: call("a", 2.0), "b": lambda: call("b", 3.0)}
    timings = interleaved(calls, CPU, 2, before=lambda: call("flush", 50.0), calls_each=2)
    assert log == ["a", "a", "b", "b", *["flush", "a", "a", "flush", "b", "b"] * 2]
    assert timings == {"a": (2.0, 2.0, 2.0, 2), "b": (3.0, 3.0, 3.0, 2)}


def test_work_counts_each_operand_once() -> None:
    assert linear_work(2, 3, 5, 4) == ((6 + 15 + 10) * 4, 60)
    assert linear_work(2, 3, 5, 4, operands=1) == ((6 + 15 + 20) * 4, 60)
    assert gated_linear_work(2, 3, 5, 2) == ((6 + 30 + 10) * 2, 120)
    assert elementwise_work(2, 3, 2, operands=2) == (36, 0)
