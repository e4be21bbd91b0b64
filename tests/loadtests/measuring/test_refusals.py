import re
from dataclasses import replace

import pytest

from loadtests.evidence import Run
from loadtests.measuring.refusals import overloaded
from service.settings import load
from tests.loadtests import made_evidence

REQUEST_ROWS = load([]).request_rows


def runs(users: tuple[int, ...] = (4, 16)) -> list[Run]:
    """Of which the server refused some to so many users."""
    found = made_evidence.compared().runs
    return [replace(run, errors={"overloaded": 3}) if run.users in users else run for run in found]


def test_without_a_refusal_there_is_nothing_to_do() -> None:
    assert overloaded(runs(users=()), 64, REQUEST_ROWS, None) is None


@pytest.mark.parametrize(("rows", "least"), [(1, REQUEST_ROWS), (16, REQUEST_ROWS), (128, 2048)])
def test_closed_loops_that_are_refused_are_told_with_a_bound_that_the_server_takes(rows: int, least: int) -> None:
    told = str(overloaded(runs(), rows, REQUEST_ROWS, None))
    assert f"the server had no room for what 16 users send at once, {16 * rows} rows; " in told
    (flags,) = re.findall(r" -- (--max-queue-rows \d+) at least lets them wait", told)
    assert load(flags.split()).max_queue_rows == least


def test_a_server_that_runs_is_to_be_started_with_the_bound() -> None:
    told = str(overloaded(runs(), 1, REQUEST_ROWS, "http://127.0.0.1:8000"))
    assert f"; start it with --max-queue-rows {REQUEST_ROWS} at least" in told
    assert " -- " not in told


def test_a_server_that_does_not_tell_what_a_request_may_hold_is_asked_for_the_rows_alone() -> None:
    assert "-- --max-queue-rows 1024 at least" in str(overloaded(runs(), 64, None, None))


def test_arrivals_beyond_what_is_answered_have_to_be_refused() -> None:
    arrivals = [replace(run, errors={"overloaded": 3}) for run in runs(users=()) if run.loop == "open"]
    assert arrivals
    assert overloaded(arrivals, 64, REQUEST_ROWS, None) is None
