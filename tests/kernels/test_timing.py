import time

import pytest
import torch

from kernels.timing import interleaved, summary

CPU = torch.device("cpu")


def test_a_timing_is_the_median_with_its_spread() -> None:
    assert summary([5.0, 1.0, 2.0, 3.0, 4.0, 100.0]) == (3.5, 2.0, 5.0, 6)
    with pytest.raises(ValueError, match="needs one repetition or more"):
        summary([])


def test_a_repetition_times_every_call_and_starts_with_another_each_time_after_two_that_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []
    clock = [0.0]

    def call(name: str, seconds: float) -> None:
        log.append(name)
        clock[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    calls = {"a": lambda: call("a", 2.0), "b": lambda: call("b", 3.0)}
    timings = interleaved(calls, CPU, 2, before=lambda: call("flush", 50.0), calls_each=2)
    taken = ["flush", "a", "a", "flush", "b", "b"]
    assert log == ["a", "a", "b", "b", *taken, *taken[3:], *taken[:3]]
    assert timings == {"a": (2.0, 2.0, 2.0, 2), "b": (3.0, 3.0, 3.0, 2)}
