from service.assembly import Assembly


def test_times_add_up_to_the_time_from_acceptance_to_the_last_result_and_the_largest_batch_counts() -> None:
    whole = Assembly(accepted_ns=100)
    whole.add(memoryview(b"ab"), taken_ns=110, start_ns=115, took_ns=50, batch_rows=2)
    whole.add(memoryview(b"cd"), taken_ns=180, start_ns=181, took_ns=40, batch_rows=2)
    whole.add(memoryview(b"e"), taken_ns=221, start_ns=223, took_ns=10, batch_rows=1)
    assert (whole.waited_ns, whole.batch_ns, whole.took_ns, whole.batch_rows) == (10 + 15, 5 + 1 + 2, 100, 2)
    assert whole.accepted_ns + whole.waited_ns + whole.batch_ns + whole.took_ns == 233
    assert whole.outputs == b"abcde"


def test_what_is_taken_while_the_batch_before_computes_has_not_waited_meanwhile() -> None:
    whole = Assembly(accepted_ns=0)
    whole.add(memoryview(b"a"), taken_ns=10, start_ns=20, took_ns=100, batch_rows=1)
    whole.add(memoryview(b"b"), taken_ns=30, start_ns=120, took_ns=100, batch_rows=1)  # from the end of the first
    assert (whole.waited_ns, whole.batch_ns, whole.took_ns) == (10, 10, 200)
