from service.batcher import Batcher, Waiting

EAGER, FUSED = 0, 1


def request(name: int, backend: int = EAGER, rows: int = 1, accepted: int = 0, deadline: int = 10**9) -> Waiting[str]:
    return Waiting("client", name, backend, rows, b"", accepted, deadline)


def taken(batcher: Batcher[str], now: int = 0) -> tuple[list[int], list[int]]:
    batch, expired = batcher.take(now)
    return [r.request_id for r in batch], [r.request_id for r in expired]


def filled(*requests: Waiting[str], max_batch_rows: int = 8) -> Batcher[str]:
    batcher: Batcher[str] = Batcher(2, max_batch_rows)
    for each in requests:
        batcher.add(each)
    return batcher


def test_all_that_waits_for_one_backend_becomes_one_batch() -> None:
    batcher = filled(request(1), request(2, rows=3), request(3))
    assert taken(batcher) == ([1, 2, 3], [])
    assert (len(batcher), batcher.rows(0)) == (0, 0)


def test_the_backend_of_the_oldest_request_goes_first() -> None:
    batcher = filled(request(1, EAGER, accepted=5), request(2, FUSED, accepted=3), request(3, EAGER, accepted=1))
    assert [taken(batcher)[0], taken(batcher)[0]] == [[2], [1, 3]]


def test_backends_never_share_a_batch() -> None:
    batcher = filled(request(1, EAGER), request(2, FUSED), request(3, EAGER))
    assert taken(batcher) == ([1, 3], [])
    assert taken(batcher) == ([2], [])


def test_a_batch_never_exceeds_the_row_bound_and_never_splits_a_request_that_fits() -> None:
    batcher = filled(request(1, rows=5), request(2, rows=4), request(3, rows=8))
    assert [taken(batcher)[0] for _ in range(4)] == [[1], [2], [3], []]


def test_a_request_of_more_rows_than_a_batch_is_taken_a_batch_at_a_time_and_what_comes_meanwhile_goes_first() -> None:
    batcher = filled(request(1, rows=20, accepted=1), request(2, accepted=2))
    batch, _ = batcher.take(3)
    assert [(part.request_id, part.rows, part.is_last) for part in batch] == [(1, 8, False)]
    assert (len(batcher), batcher.rows(EAGER)) == (2, 13)
    batcher.add(request(3, accepted=4))
    assert taken(batcher, now=5) == ([2, 3], [])
    batcher.add(request(4, accepted=6))
    assert taken(batcher, now=7) == ([1], [])
    batcher.add(request(5, accepted=8))
    assert [taken(batcher, now=9)[0] for _ in range(3)] == [[4, 5, 1], [], []]  # what is left fits beside others
    assert len(batcher) == 0


def test_what_is_left_of_a_request_goes_behind_what_other_backends_got_meanwhile_and_before_what_they_get_later() -> (
    None
):
    batcher = filled(request(1, rows=20, accepted=1))
    assert taken(batcher, now=2) == ([1], [])
    batcher.add(request(2, FUSED, accepted=3))
    assert batcher.first is not None
    assert (batcher.first.request_id, batcher.is_next_full) == (2, False)
    assert taken(batcher, now=4) == ([2], [])
    batcher.add(request(3, FUSED, accepted=5))
    assert [taken(batcher, now=6)[0] for _ in range(3)] == [[1], [3], [1]]


def test_parts_of_a_request_are_its_rows_in_order_and_come_together_in_one_place() -> None:
    batcher = filled(Waiting("client", 1, EAGER, 5, bytes(range(20)), 0, 10**9), max_batch_rows=2)
    parts = [part for _ in range(3) for part in batcher.take(1)[0]]
    assert [bytes(part.payload) for part in parts] == [bytes(range(8)), bytes(range(8, 16)), bytes(range(16, 20))]
    assert [(part.rows, part.is_last) for part in parts] == [(2, False), (2, False), (1, True)]
    assert len({id(part.assembly) for part in parts}) == 1


def test_two_large_requests_take_turns() -> None:
    batcher = filled(request(1, rows=20), request(2, rows=17))
    assert [taken(batcher, now)[0] for now in range(5)] == [[1], [2], [1], [2], [1, 2]]


def test_what_is_left_of_a_request_may_expire_be_cancelled_or_go_with_its_client() -> None:
    for end in ("expire", "cancel", "drop"):
        batcher = filled(request(1, rows=20, deadline=5), request(2))
        (part,), _ = batcher.take(4)
        if end == "cancel":
            assert batcher.cancel("client", 1)
        elif end == "drop":
            assert batcher.drop("client") == 2
        assert batcher.rows(EAGER) == {"expire": 13, "cancel": 1, "drop": 0}[end]
        assert taken(batcher, now=5) == ([] if end == "drop" else [2], [1] if end == "expire" else [])
        assert taken(batcher, now=5) == ([], [])
        assert len(batcher) == 0
        assert part.assembly is not None
        assert part.assembly.is_over == (end != "expire")  # whoever answers it says so otherwise


def test_the_next_batch_is_full_where_its_own_backends_rows_are_as_many_as_it_holds() -> None:
    batcher = filled(request(1, EAGER, rows=7, accepted=1), request(2, FUSED, rows=8, accepted=2))
    assert (batcher.is_full, batcher.is_next_full) == (True, False)
    batcher.add(request(3, EAGER, accepted=3))
    assert batcher.is_next_full
    batcher.cancel("client", 3)
    assert not batcher.is_next_full
    assert not filled().is_next_full


def test_what_is_left_of_a_request_that_has_begun_keeps_no_others_unread() -> None:
    batcher = filled(request(1, EAGER, rows=30, accepted=1))
    assert batcher.is_full
    batcher.take(now_ns=5)
    assert (batcher.is_full, batcher.is_next_full) == (False, True)
    batcher.add(request(2, EAGER, rows=8, accepted=2))
    assert batcher.is_full


def test_a_request_whose_deadline_passed_is_set_aside_and_takes_no_room() -> None:
    batcher = filled(request(1, deadline=5), request(2, rows=8), request(3, FUSED, deadline=5))
    assert taken(batcher, now=5) == ([2], [1, 3])
    assert batcher.rows(0) == 0


def test_an_expired_request_behind_a_live_one_is_not_computed() -> None:
    batcher = filled(request(1), request(2, deadline=5), request(3))
    assert taken(batcher, now=6) == ([1, 3], [2])


def test_a_client_that_is_gone_takes_its_requests_along() -> None:
    batcher = filled(request(1), request(2))
    batcher.add(Waiting("other", 3, EAGER, 2, b"", 0, 10**9))
    assert batcher.drop("client") == 2
    assert (taken(batcher)[0], batcher.rows(0)) == ([3], 0)
