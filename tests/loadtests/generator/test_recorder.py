import time
from typing import Any

import pytest

from loadtests.generator.load import Load
from loadtests.generator.recorder import LOST_LIMIT, Recorder
from loadtests.generator.sender import Outcome
from loadtests.generator.tally import SAMPLES


def load(loop: str = "open") -> Load:
    return Load((("eager", 1), ("fused", 1)), loop, "a load", warm_up_s=10, seconds=5, seed=(0,))


def context(due_s: float, kind: int = 0, code: str | None = None, **fields: Any) -> dict[str, Any]:
    outcome = Outcome(due_s, 2.0, 0.5, code, stages_ms=(0.1, 0.2, 0.3, 0.4), batch_rows="1", **fields)
    return {"kind": kind, "payload": 0, "outcome": outcome}


def test_what_was_due_in_the_warm_up_or_after_the_end_is_not_counted() -> None:
    recorder = Recorder(load(), start_s=100.0)
    for due_s in (105.0, 109.9, 110.0, 114.9, 115.0):
        recorder(context(due_s))
    tally = recorder.tallies[0]
    assert (tally.sent, tally.answered) == (2, 2)
    assert list(tally.moments_s) == pytest.approx([0.0, 4.9])
    assert tally.stages_ms == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert tally.first_ms == 2.0  # of the warm-up


def test_a_closed_loop_counts_by_the_reply() -> None:
    recorder = Recorder(load("closed"), start_s=time.perf_counter() - 12)
    recorder(context(due_s=0.0))
    assert recorder.tallies[0].answered == 1


def test_what_a_closed_loop_got_no_answer_to_counts_although_that_is_known_only_after_the_end() -> None:
    recorder = Recorder(load("closed"), start_s=time.perf_counter() - 16)
    for code in ("no_answer", "connection", None):
        recorder(context(due_s=0.0, code=code))
    tally = recorder.tallies[0]
    assert (tally.sent, tally.errors) == (1, {"no_answer": 1})


def test_a_load_that_goes_on_counts_what_comes_meanwhile() -> None:
    recorder = Recorder(load("closed"), start_s=time.perf_counter() - 16)
    recorder(context(due_s=0.0))
    assert not recorder.has_counted
    recorder.longer_s = 3600.0
    recorder(context(due_s=0.0))
    assert recorder.has_counted
    assert recorder.tallies[0].answered == 1


def test_kinds_are_counted_apart_and_errors_by_code() -> None:
    recorder = Recorder(load(), start_s=0.0)
    recorder(context(11.0, kind=1))
    recorder(context(11.0, kind=1, code="overloaded", head=b"HTTP/1.1 429"))
    recorder(context(11.0, kind=1, code="connection"))
    recorder.unsent(1, 11.0)
    recorder.unsent(1, 9.0)
    assert recorder.tallies[0].sent == 0
    tally = recorder.tallies[1]
    assert (tally.sent, tally.answered, tally.offered) == (3, 1, 4)
    assert tally.errors == {"overloaded": 1, "connection": 1, "unsent": 1}
    assert list(tally.refusals_ms) == [2.0]


def test_a_server_that_is_gone_is_a_fault_and_one_lost_reply_is_none() -> None:
    recorder = Recorder(load(), start_s=0.0)
    for _ in range(LOST_LIMIT - 1):
        recorder(context(11.0, code="connection"))
    recorder(context(11.0))
    recorder(context(11.0, code="connection"))
    assert recorder.fault is None
    for _ in range(LOST_LIMIT):
        recorder(context(11.0, code="connection"))
    assert recorder.fault == f"{LOST_LIMIT} requests in a row got no reply (connection)"


def test_replies_are_kept_from_the_whole_of_a_load_and_not_too_many() -> None:
    recorder = Recorder(load(), start_s=0.0)
    for number in range(1000):
        recorder(context(11.0, body=b"%d" % number))
    kept = [int(each.body) for each in recorder.tallies[0].samples]
    assert SAMPLES // 2 <= len(kept) <= SAMPLES
    assert min(kept) < 100
    assert max(kept) > 800
