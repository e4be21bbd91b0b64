"""What HTTP processes share, with processes that are really forked."""

import os

from service.shared_state import AUTO, SharedState


def in_child(act: object) -> int:
    """Run something in a forked process and return the status that it gives."""
    child = os.fork()
    if child == 0:
        os._exit(int(act()))  # type: ignore[operator]
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


def test_one_profile_at_a_time_over_all_processes_and_none_is_held_by_the_dead() -> None:
    state = SharedState(2)
    assert in_child(state.begin_profile) == 1  # and it ends without giving it back
    assert state.begin_profile()
    assert not state.begin_profile()
    assert in_child(state.begin_profile) == 0
    state.end_profile()
    assert in_child(state.begin_profile) == 1
