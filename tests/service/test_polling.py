"""When a process looks for work before it sleeps."""

import asyncio

import pytest

from service.polling import ALONE, Poller, Streak


@pytest.mark.parametrize(
    ("came", "is_long"),
    [
        ([True] * (ALONE - 1), False),
        ([True] * ALONE, True),
        ([True] * ALONE + [False], False),
        ([True] * ALONE + [False] + [True] * ALONE, True),
    ],
    ids=["too few", "enough", "then not alone", "alone again"],
)
def test_a_streak_is_long_once_enough_requests_in_a_row_came_alone(came: list[bool], is_long: bool) -> None:
    streak = Streak()
    for is_alone in came:
        streak.add(is_alone)
    assert streak.is_long == is_long


async def turns_of(poller: Poller) -> int:
    """How often the loop turns by the poller's doing while it does nothing else."""
    poller.attend()
    turns = 0
    while poller.is_turning:
        turns += 1
        await asyncio.sleep(0)
    return turns


@pytest.mark.parametrize(("spin_us", "alone", "turns"), [(1000, ALONE, True), (1000, 0, False), (0, ALONE, False)])
def test_only_a_lone_callers_next_request_is_looked_for(spin_us: int, alone: int, turns: bool) -> None:
    poller = Poller(spin_us)
    for _ in range(alone):
        poller.streak.add(True)
    assert (asyncio.run(turns_of(poller)) > 0) == turns
