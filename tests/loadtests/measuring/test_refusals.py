from dataclasses import replace

from loadtests.measuring.refusals import full_queue
from tests.loadtests import made_evidence


def test_closed_loops_that_are_refused_are_told_with_what_lets_them_wait() -> None:
    runs = made_evidence.compared().runs
    assert full_queue(runs, 64) is None
    refused = [replace(run, errors={"overloaded": 3}) for run in runs if run.users in (4, 16)]
    assert "-- --max-queue-rows 1024 lets them wait" in str(full_queue([*runs, *refused], 64))


def test_arrivals_beyond_what_is_answered_have_to_be_refused() -> None:
    arrivals = [replace(run, errors={"overloaded": 3}) for run in made_evidence.compared().runs if run.loop == "open"]
    assert arrivals
    assert full_queue(arrivals, 64) is None
