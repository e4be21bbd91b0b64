from itertools import pairwise

from service.host import FIRST_DELAY_S, LONGEST_DELAY_S, delay_s


def test_the_wait_doubles_to_a_bound_and_stays_there() -> None:
    waits = [delay_s(failures) for failures in range(1, 9)]
    assert waits[0] == FIRST_DELAY_S
    assert all(later == min(2 * earlier, LONGEST_DELAY_S) for earlier, later in pairwise(waits))
    assert waits[-1] == delay_s(10**6) == LONGEST_DELAY_S
