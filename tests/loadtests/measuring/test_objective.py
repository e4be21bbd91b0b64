from loadtests.measuring.objective import Verdict, table


def test_a_ceiling_and_a_floor_pass_at_the_limit() -> None:
    assert Verdict("p99", "ms", 50.0, 50.0).has_passed
    assert not Verdict("p99", "ms", 50.1, 50.0).has_passed
    assert Verdict("goodput", "/s", 50.0, 50.0, is_floor=True).has_passed
    assert not Verdict("goodput", "/s", 49.9, 50.0, is_floor=True).has_passed


def test_what_could_not_be_measured_has_not_passed() -> None:
    assert not Verdict("p99", "ms", None, 50.0).has_passed


def test_the_table_says_what_was_wanted_what_came_and_how_it_ended() -> None:
    _, passed, failed, missing = table(
        [Verdict("p99", "ms", 12.5, 50.0), Verdict("goodput", "/s", 9.0, 10.0, True), Verdict("errors", "", None, 0.0)]
    ).splitlines()
    assert passed.split() == ["p99", "<=", "50", "ms", "12.5", "ms", "pass"]
    assert failed.split() == ["goodput", ">=", "10", "/s", "9", "/s", "FAIL"]
    assert missing.split() == ["errors", "<=", "0", "not", "measured", "FAIL"]
