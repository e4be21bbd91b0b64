"""What HTTP processes share, with processes that are really forked."""

import os
from collections.abc import Callable
from functools import partial

from service.shared_state import AUTO, Outage, SharedState


def in_child(act: Callable[[], int | None]) -> int:
    """Run something in a forked process and return the status that it gives."""
    child = os.fork()
    if child == 0:
        os._exit(int(act() or 0))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_one_process_sets_the_others_see() -> None:
    state = SharedState(2)
    assert (state.default_backend, state.is_draining, state.are_all_ready) == (AUTO, False, False)

    def change() -> int:
        state.default_backend = 1
        state.start_draining()
        state.set_ready(0, True)
        state.set_ready(1, True)
        return 0

    in_child(change)
    assert (state.default_backend, state.is_draining, state.are_all_ready) == (1, True, True)


def test_one_process_takes_a_backend_out_once_and_all_know_why() -> None:
    state = SharedState(2, backends=2)
    changes = state.changes
    assert in_child(lambda: state.take_out(1, Outage(7.5, "wrong: \u00e9"))) == 1
    assert (state.outage(0), state.outage(1)) == (None, Outage(7.5, "wrong: \u00e9"))
    assert state.changes > changes
    assert not state.take_out(1, Outage(8.0, "again"))
    in_child(partial(state.put_back, 1))
    assert state.outage(1) is None
    assert state.take_out(1, Outage(9.0, "x" * 1000))
    assert state.outage(1) == Outage(9.0, "x" * 500)


def test_every_change_is_counted_however_many_make_some() -> None:
    state = SharedState(1, backends=2)
    children = []
    for _ in range(4):
        child = os.fork()
        if child == 0:
            while not state.is_draining:  # so that all start at once
                pass
            for _ in range(5000):
                state.canary = (0.25, 0.0)
            os._exit(0)
        children.append(child)
    state.start_draining()
    for child in children:
        os.waitpid(child, 0)
    assert (state.changes, state.canary) == (20_000, (0.25, 0.0))


def test_one_profile_at_a_time_over_all_processes_and_none_is_held_by_the_dead() -> None:
    state = SharedState(2)
    assert in_child(state.begin_profile) == 1  # and it ends without giving it back
    assert state.begin_profile()
    assert not state.begin_profile()
    assert in_child(state.begin_profile) == 0
    state.end_profile()
    assert in_child(state.begin_profile) == 1
