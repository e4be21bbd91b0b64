from loadtests.generator.tally import Sample, Tally, total


def tally(backend: str = "fused", rows: int = 2) -> Tally:
    made = Tally(backend, rows, sent=3)
    made.latencies_ms.extend([1.0, 5.0])
    made.moments_s.extend([0.1, 0.2])
    made.stages_ms = [0.5, 0.25, 4.0, 0.25]
    made.batch_rows["4"] += 2
    made.errors["overloaded"] += 1
    made.samples.append(Sample(backend, rows, 7, b"head", b"body"))
    made.generator_cpu = 0.4
    return made


def test_a_tally_travels_as_a_message() -> None:
    assert Tally.of_message(tally().message()) == tally()


def test_parts_add_up() -> None:
    whole = total([tally(), tally("eager")])
    assert (whole.backend, whole.rows) == ("eager+fused", 2)
    assert (whole.sent, whole.answered) == (6, 4)
    assert whole.errors == {"overloaded": 2}
    assert whole.batch_rows == {"4": 4}
    assert whole.stages_ms == [1.0, 0.5, 8.0, 0.5]
    assert whole.generator_cpu == 0.4
    assert len(whole.samples) == 2


def test_what_could_not_be_sent_was_offered_all_the_same() -> None:
    counted = tally()
    counted.errors["unsent"] += 5
    assert (counted.sent, counted.offered) == (3, 8)


def test_only_what_was_answered_within_the_limit_is_in_time() -> None:
    assert tally().within(4.9) == 1
    assert tally().within(5.0) == 2
