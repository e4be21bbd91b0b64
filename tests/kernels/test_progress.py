import io
import time

import pytest

from kernels.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_short_task_shows_nothing(clock: list[float]) -> None:
    stream = Terminal()
    with Progress("aot", 2, stream) as bar:
        clock[0] += 1.9
        bar.step()
    assert stream.getvalue() == ""


def test_a_terminal_shows_a_bar_and_the_time_left(clock: list[float]) -> None:
    stream = Terminal()
    with Progress("aot", 4, stream) as bar:
        clock[0] += 5
        bar.step("linear")
        assert stream.getvalue() == "\r\x1b[Kaot  [######..................] 1/4  15 s left  linear"
        bar.step("too soon")
        assert "too soon" not in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[Kaot: done in 5.0 s\n")


def test_a_file_gets_two_lines(clock: list[float]) -> None:
    stream = io.StringIO()
    with Progress("aot", 4, stream) as bar:
        for _ in range(3):
            clock[0] += 5
            bar.step()
    assert stream.getvalue() == "aot: 4 steps ...\naot: done in 15.0 s\n"


def test_a_task_that_fails_says_that_it_stopped(clock: list[float]) -> None:
    stream = io.StringIO()
    bar = Progress("aot", 4, stream)
    clock[0] += 5
    bar.step()
    bar.__exit__(KeyError, KeyError(), None)
    assert stream.getvalue().endswith("aot: stopped after 5.0 s\n")
