"""The progress bar: when it shows, what it shows, and what it never does."""

import io
import math
import threading

import pytest

from kernels.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def written_by(stream: io.StringIO, seconds: list[float], total: float = 10) -> str:
    """Return what is written when step i is done at the i-th time."""
    clock = Clock()
    with Progress("training", stream=stream, clock=clock) as progress:
        for done, second in enumerate(seconds, start=1):
            clock.now = 100 + second
            progress(done, total)
    return stream.getvalue()


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_a_short_task_shows_nothing(stream: io.StringIO) -> None:
    assert written_by(stream, [0.5, 1.0, 1.9]) == ""


def test_a_terminal_gets_a_bar_that_is_cleared_in_the_end() -> None:
    written = written_by(Terminal(), [1.0, 3.0, 6.0])
    assert written == (
        "\r\x1b[Ktraining  [#####...................] 2/10  12 s left"
        "\r\x1b[Ktraining  [#######.................] 3/10  14 s left"
        "\r\x1b[Ktraining: done in 6.0 s\n"
    )


def test_a_file_gets_one_line_at_the_start_and_one_at_the_end() -> None:
    assert written_by(io.StringIO(), [1.0, 3.0, 4.0, 5.0]) == "training ...\ntraining: done in 5.0 s\n"


def test_a_bar_is_not_drawn_more_often_than_it_can_be_read() -> None:
    assert written_by(Terminal(), [3.0, 3.01, 3.02, 3.2]).count("\x1b[K") == 3


def test_a_task_that_fails_says_so_and_the_error_goes_on() -> None:
    clock, stream = Clock(), io.StringIO()

    def fail() -> None:
        with Progress("training", stream=stream, clock=clock) as progress:
            clock.now += 3
            progress(1, 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert stream.getvalue() == "training ...\ntraining: stopped after 3.0 s\n"


def test_without_patience_the_start_shows() -> None:
    stream = io.StringIO()
    with Progress("compiling", stream=stream, patience_s=0, clock=Clock()) as progress:
        progress(0, 1)
        assert stream.getvalue() == "compiling ...\n"


@pytest.mark.parametrize(
    ("kind", "start", "end"),
    [(Terminal, "\r\x1b[Kcompiling ...", "\r\x1b[Kcompiling: done in 3.0 s\n"),
     (io.StringIO, "compiling ...\n", "compiling: done in 3.0 s\n")],
    ids=["terminal", "file"],
)  # fmt: skip
def test_a_task_that_tells_nothing_is_shown_by_its_label(kind: type[io.StringIO], start: str, end: str) -> None:
    stream, clock, is_written = kind(), Clock(), threading.Event()
    stream.flush = is_written.set  # type: ignore[method-assign]
    with Progress("compiling", stream=stream, patience_s=0.01, clock=clock):
        assert is_written.wait(60)
        assert stream.getvalue() == start
        clock.now += 3
    assert stream.getvalue() == start + end


def test_no_thread_is_left_behind() -> None:
    stream = io.StringIO()
    with Progress("training", stream=stream, patience_s=3600) as progress:
        assert progress._watch.is_alive()
    assert not progress._watch.is_alive()
    assert stream.getvalue() == ""


@pytest.mark.parametrize("total", [0, -1, math.nan, math.inf])
def test_a_total_that_is_none_shows_the_steps_alone(total: float) -> None:
    written = written_by(Terminal(), [3.0], total)
    assert written.startswith("\r\x1b[Ktraining  1 steps\r")


@pytest.mark.parametrize(
    ("done", "shown"), [(0, "[" + "." * 24 + "] 0/10"), (20, "[" + "#" * 24 + "] 20/10"), (math.nan, "nan steps")]
)
def test_odd_counts_break_nothing(done: float, shown: str) -> None:
    clock, stream = Clock(), Terminal()
    with Progress("training", stream=stream, clock=clock) as progress:
        clock.now += 3
        progress(done, 10, note="loss nan")
    assert shown in stream.getvalue()
    assert "loss nan" in stream.getvalue()


def test_a_line_never_exceeds_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    lines = written_by(Terminal(), [3.0]).split("\r\x1b[K")
    assert lines[1] == "training  [##......"


def test_steps_count_themselves() -> None:
    stream, clock = Terminal(), Clock()
    with Progress("checking", 4, stream=stream, clock=clock) as progress:
        for name in ("first", "second", "third"):
            clock.now += 2
            progress.step(name)
    assert "3/4" in stream.getvalue()
    assert "third" in stream.getvalue()
