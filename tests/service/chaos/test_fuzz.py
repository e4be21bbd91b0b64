"""A few hundred of the cases that `fuzz.py` sends for as long as it is told."""

import math

import pytest

from tests.service.chaos.fuzz import FLAGS, LEAK, case, fuzz
from tests.service.running_server import Start

CASES = 400


def test_a_case_depends_on_its_seed_and_number_alone() -> None:
    assert [case(1, number) for number in range(300)] == [case(1, number) for number in range(300)]
    assert case(1, 0) != case(2, 0)


@pytest.mark.parametrize(
    "told", ['File "server.py", line 3', "in /srv/service/server.py", "server.py:3", "at 0x7f00aa55"]
)
def test_what_tells_of_the_inside_is_known_for_it(told: str) -> None:
    assert LEAK.search(told)


def test_a_field_that_a_client_calls_py_tells_nothing_of_the_inside() -> None:
    assert not LEAK.search("parameters.py: no such field here")


@pytest.mark.slow
def test_whatever_is_sent_is_answered_within_the_contract_or_closed_and_harms_nobody(start: Start) -> None:
    report = fuzz(start(*FLAGS).wait_ready(), seed=0, first=0, last=CASES - 1, seconds=math.inf)
    assert report["problems"] == []
    assert report["cases"] == CASES
    assert {"200", "400", "404", "405", "413", "415"} <= set(report["statuses"])
