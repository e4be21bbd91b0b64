"""One worker's loop, turned by hand, with a caller at the other end of a real socket."""

import copy
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from torch import Tensor

from kernels.numerics import disagreement
from models.engine import load_engine
from models.errors import OutOfMemoryError
from service import worker
from service.wire import Frame, Kind
from service.worker import Profiling
from tests.service.caller import FOREVER_NS, HOUR_NS, Caller, infer, profile_frame
from tests.service.frames import packed

Connect = Callable[..., Caller]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    callers: list[Caller] = []

    def make(run: Callable[..., Tensor], **arguments: Any) -> Caller:
        callers.append(Caller(tmp_path / f"{len(callers)}.sock", run, **arguments))
        return callers[-1]

    yield make
    for caller in callers:
        caller.close()


def echo(rows: Tensor, backend: str) -> Tensor:
    return rows.clone()


def test_what_waits_is_computed_together_and_each_gets_its_own_rows(connect: Connect) -> None:
    caller = connect(echo)
    caller.send(infer(7, rows=2), infer(8), infer(9, rows=3))
    caller.turn()
    frames = caller.received()
    assert [(frame.kind, frame.request_id, frame.rows, frame.batch_rows) for frame in frames] == [
        (Kind.RESULT, 7, 2, 6),
        (Kind.RESULT, 8, 1, 6),
        (Kind.RESULT, 9, 3, 6),
    ]
    for frame in frames:
        assert set(np.frombuffer(frame.payload, dtype=np.float32)) == {float(frame.request_id)}


def test_requests_that_no_socket_buffer_holds_at_once_are_one_batch(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "REST_OF_FRAME_NS", HOUR_NS)  # the sender may be slow here
    caller = connect(echo, max_batch_rows=1 << 21)
    frames = [infer(number, rows=20_000) for number in range(1, 61)]  # 160 kB each
    sender = threading.Thread(target=caller.send, args=frames)
    sender.start()
    received: list[Frame] = []
    reader = threading.Thread(target=lambda: received.extend(caller.all_of(len(frames))))
    reader.start()
    caller.turn()
    while caller.worker.is_amid_frames:
        caller.turn()
    for thread in (sender, reader):
        thread.join(60)
    assert {frame.batch_rows for frame in received} == {60 * 20_000}


def test_a_request_is_held_back_until_those_who_were_answered_with_it_are_back(connect: Connect) -> None:
    caller = connect(echo, hold_share=1.0)
    hold = caller.worker.hold
    for rows in [1, 2] * 20:  # batches that take an hour whatever they hold, answered just now
        hold.note_answers(0, rows, rows, HOUR_NS + rows, time.monotonic_ns())
        for _ in range(rows):
            hold.note_arrival(time.monotonic_ns())
    hold.note_answers(0, 2, 2, HOUR_NS, time.monotonic_ns())
    caller.send(infer(1))
    caller.turn()
    assert caller.received() == []
    caller.send(infer(2))
    caller.turn()
    assert [(frame.request_id, frame.batch_rows) for frame in caller.received()] == [(1, 2), (2, 2)]


def test_a_batch_that_is_full_is_held_back_for_nobody(connect: Connect) -> None:
    caller = connect(echo, max_batch_rows=4, hold_share=1.0)
    hold = caller.worker.hold
    for rows in [1, 8] * 20:  # batches that take an hour whatever they hold
        hold.note_answers(0, rows, rows, HOUR_NS + rows, time.monotonic_ns())
        for _ in range(rows):
            hold.note_arrival(time.monotonic_ns())
    hold.note_answers(0, 2, 2, HOUR_NS, time.monotonic_ns())
    assert hold.until_ns(0, 4) > time.monotonic_ns()
    caller.send(infer(1, rows=4))
    caller.turn()
    assert [frame.request_id for frame in caller.received()] == [1]


def test_memory_is_looked_at_after_each_batch(connect: Connect) -> None:
    done: list[str] = []

    def run(rows: Tensor, backend: str) -> Tensor:
        done.append("batch")
        return echo(rows, backend)

    caller = connect(run, bound_memory=lambda: done.append("memory"))
    done.clear()
    for number in (1, 2):
        caller.send(infer(number))
        caller.turn()
    assert done == ["batch", "memory"] * 2


def test_a_cancelled_request_leaves_the_queue_uncomputed(connect: Connect) -> None:
    caller = connect(echo)
    caller.send(infer(1), infer(2, rows=5), Frame(Kind.CANCEL, 2, b""), Frame(Kind.CANCEL, 99, b""))
    caller.turn()
    kinds = {frame.request_id: (frame.kind, frame.batch_rows) for frame in caller.received()}
    assert kinds == {2: (Kind.CANCELLED, 0), 1: (Kind.RESULT, 1)}


def test_a_request_whose_time_is_up_is_answered_and_not_computed(connect: Connect) -> None:
    caller = connect(echo)
    caller.send(infer(1, deadline_ns=1), infer(2))
    caller.turn()
    frames = {frame.request_id: frame for frame in caller.received()}
    assert bytes(frames[1].payload).startswith(b"deadline_exceeded\n")
    assert (frames[2].kind, frames[2].batch_rows) == (Kind.RESULT, 1)


def test_a_request_at_fault_fails_alone(connect: Connect) -> None:
    def fails_on_three(rows: Tensor, backend: str) -> Tensor:
        if bool((rows == 3).any()):
            raise RuntimeError("three")
        return echo(rows, backend)

    caller = connect(fails_on_three)
    caller.send(*(infer(request_id) for request_id in range(1, 6)))
    caller.turn()
    frames = {frame.request_id: frame for frame in caller.received()}
    assert [request_id for request_id, frame in frames.items() if frame.kind == Kind.ERROR] == [3]
    assert bytes(frames[3].payload) == b"internal\nRuntimeError: three"
    assert len(frames) == 5


def test_a_batch_that_does_not_fit_is_computed_in_parts_and_what_never_fits_is_told(connect: Connect) -> None:
    sizes: list[int] = []

    def holds_four(rows: Tensor, backend: str) -> Tensor:
        if len(rows) > 4:
            raise OutOfMemoryError(len(rows), "cuda:0")
        sizes.append(len(rows))
        return echo(rows, backend)

    caller = connect(holds_four)
    caller.send(*(infer(request_id) for request_id in range(10)), infer(10, rows=5))
    caller.turn()
    frames = {frame.request_id: frame for frame in caller.received()}
    assert [request_id for request_id, frame in frames.items() if frame.kind == Kind.RESULT] == list(range(10))
    assert bytes(frames[10].payload).startswith(b"backend_unavailable\ncuda:0 has not enough free memory for 5 rows")
    assert sum(sizes) == 10
    assert max(sizes) > 1
    caller.send(infer(11))
    caller.turn()
    assert [frame.kind for frame in caller.received()] == [Kind.RESULT]


class Sizes:
    """An engine that writes down how many rows it is given, and does something else at each run."""

    def __init__(self, *meanwhile: Callable[[], None]) -> None:
        self.seen: list[int] = []
        self._meanwhile = meanwhile

    def run(self, rows: Tensor, backend: str) -> Tensor:
        self.seen.append(len(rows))
        if len(self.seen) <= len(self._meanwhile):
            self._meanwhile[len(self.seen) - 1]()
        return echo(rows, backend)


def nothing() -> None:
    pass


def drained(caller: Caller) -> list[Frame]:
    """Turn until nothing waits, and return what came."""
    caller.turn()
    while len(caller.worker._batcher):
        caller.turn()
    return caller.received()


def numbered(request_id: int, rows: int) -> Frame:
    """A request each of whose numbers is another one."""
    return infer(request_id, rows)._replace(payload=np.arange(2 * rows, dtype=np.float32).tobytes())


def test_a_request_of_more_rows_than_a_batch_is_computed_in_several_and_answered_whole(connect: Connect) -> None:
    sizes = Sizes()
    caller = connect(sizes.run, max_batch_rows=4)
    sent = numbered(1, rows=11)
    caller.send(sent)
    caller.turn()
    assert caller.worker.hold._answered == 0  # nobody is about to come back
    (frame,) = drained(caller)
    assert (sizes.seen, caller.worker.hold._answered) == ([4, 4, 3], 1)
    assert (frame.kind, frame.request_id, frame.rows, frame.batch_rows) == (Kind.RESULT, 1, 11, 4)
    assert bytes(frame.payload) == sent.payload


def test_small_requests_wait_for_one_batch_of_a_large_one_and_its_last_rows_share_theirs(connect: Connect) -> None:
    sizes = Sizes(lambda: caller.send(infer(2), infer(3, rows=2)), nothing, lambda: caller.send(infer(4)))
    caller = connect(sizes.run, max_batch_rows=4)
    caller.send(numbered(1, rows=10))
    frames = drained(caller)
    assert sizes.seen == [4, 3, 4, 3]
    assert [(frame.request_id, frame.rows, frame.batch_rows) for frame in frames] == [
        (2, 1, 3),
        (3, 2, 3),
        (4, 1, 3),
        (1, 10, 4),
    ]
    assert bytes(frames[-1].payload) == numbered(1, rows=10).payload


def test_the_times_of_several_batches_add_up(connect: Connect) -> None:
    def sleeps(rows: Tensor, backend: str) -> Tensor:
        time.sleep(0.02)
        return echo(rows, backend)

    caller = connect(sleeps, max_batch_rows=4)
    sent_ns = time.monotonic_ns()
    caller.send(infer(1, rows=12))
    (frame,) = drained(caller)
    assert frame.compute_ns >= 3 * 20_000_000
    assert frame.queue_ns + frame.batch_ns + frame.compute_ns <= time.monotonic_ns() - sent_ns


def test_a_large_request_that_is_cancelled_between_two_batches_is_computed_no_further(connect: Connect) -> None:
    sizes = Sizes(lambda: caller.send(Frame(Kind.CANCEL, 1, b""), infer(2)))
    caller = connect(sizes.run, max_batch_rows=4)
    caller.send(infer(1, rows=12))
    assert [(frame.kind, frame.request_id) for frame in drained(caller)] == [(Kind.CANCELLED, 1), (Kind.RESULT, 2)]
    assert sizes.seen == [4, 1]


def test_a_large_request_whose_time_is_up_between_two_batches_is_told_and_computed_no_further(connect: Connect) -> None:
    def let_expire() -> None:
        (rest,) = caller.worker._batcher._queues[0]
        rest.deadline_ns = 1

    sizes = Sizes(let_expire)
    caller = connect(sizes.run, max_batch_rows=4)
    caller.send(infer(1, rows=12))
    (frame,) = drained(caller)
    assert bytes(frame.payload).startswith(b"deadline_exceeded\n")
    assert sizes.seen == [4]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_large_request_with_a_batch_that_fails_is_told_once_and_computed_no_further(
    connect: Connect, failing: int
) -> None:
    def fail() -> None:
        raise OutOfMemoryError(4, "cuda:0")

    sizes = Sizes(*[nothing] * failing, fail)
    caller = connect(sizes.run, max_batch_rows=4)
    caller.send(infer(1, rows=12))
    (frame,) = drained(caller)
    assert bytes(frame.payload).startswith(b"backend_unavailable\n")
    assert sizes.seen == [4] * (failing + 1)
    caller.send(infer(2))
    (frame,) = drained(caller)
    assert (frame.kind, frame.request_id) == (Kind.RESULT, 2)


def test_a_neighbour_at_fault_leaves_the_last_rows_of_a_large_request_their_results(connect: Connect) -> None:
    def fails_on_three(rows: Tensor, backend: str) -> Tensor:
        if bool((rows == 3).any()):
            raise RuntimeError("three")
        return echo(rows, backend)

    caller = connect(fails_on_three, max_batch_rows=4)
    caller.send(infer(1, rows=6))
    caller.turn()
    caller.send(infer(3))
    frames = {frame.request_id: frame for frame in drained(caller)}
    assert (frames[3].kind, frames[1].kind, frames[1].rows) == (Kind.ERROR, Kind.RESULT, 6)


def test_a_caller_that_goes_between_two_batches_takes_the_rest_along(connect: Connect, tmp_path: Path) -> None:
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sizes = Sizes(other.close)
    caller = connect(sizes.run, max_batch_rows=4)
    other.connect(str(tmp_path / "0.sock"))
    caller.turn()
    other.sendall(packed(infer(5, rows=12)))
    while not sizes.seen:
        caller.turn()
    caller.turn()
    caller.send(infer(6))
    assert [frame.request_id for frame in drained(caller)] == [6]
    assert sizes.seen == [4, 1]


@pytest.mark.parametrize("backend", [0, 1])
def test_rows_that_are_split_over_batches_answer_as_alone(connect: Connect, tiny_model: Path, backend: int) -> None:
    engine = load_engine(tiny_model, threads=1)
    sent = torch.randn(53, 8, generator=torch.Generator().manual_seed(0))
    caller = connect(engine.run, max_batch_rows=16)
    caller.send(Frame(Kind.INFER, 1, sent.numpy().tobytes(), backend, 53, 0, FOREVER_NS))
    (frame,) = drained(caller)
    got = torch.frombuffer(bytearray(frame.payload), dtype=torch.float32).view(53, -1)
    eager = torch.cat([engine.run(sent[at : at + 1], "eager") for at in range(len(sent))])
    with torch.inference_mode():
        exact = copy.deepcopy(engine.runner("eager").model).double()(sent.double())
    assert disagreement(got, eager, exact, roundings=2 * engine.config.depth + 2) is None


def test_waiting_being_put_together_and_computing_are_told_apart(connect: Connect) -> None:
    def fails_together(rows: Tensor, backend: str) -> Tensor:
        time.sleep(0.05)
        if len(rows) > 1:
            raise RuntimeError("together")
        return echo(rows, backend)

    caller = connect(fails_together)
    sent_ns = time.monotonic_ns()
    caller.send(infer(1), infer(2))
    caller.turn()
    took_ns = time.monotonic_ns() - sent_ns
    first, second = caller.received()
    for frame, tried in ((first, 1), (second, 2)):  # together, and the first alone
        assert frame.batch_ns >= tried * 50_000_000
        assert frame.compute_ns >= 50_000_000
        assert frame.queue_ns + frame.batch_ns + frame.compute_ns <= took_ns


def test_rows_that_overflow_or_are_not_numbers_change_no_neighbour(connect: Connect) -> None:
    caller = connect(lambda rows, backend: (rows * 1e38).sum(-1, keepdim=True))  # noqa: ARG005
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 1.0], [float("inf"), 1.0], [3e38, 3e38], [0.5, 0.5]])
    for request_id, row in enumerate(rows):
        caller.send(Frame(Kind.INFER, request_id, row.numpy().tobytes(), 0, 1, 0, FOREVER_NS))
    caller.turn()
    values = [float(np.frombuffer(frame.payload, dtype=np.float32)[0]) for frame in caller.received()]
    assert values[0] == pytest.approx(3e38)
    assert values[4] == pytest.approx(1e38)
    assert not np.isfinite(values[1:4]).any()


def test_a_caller_that_is_gone_takes_its_requests_along(connect: Connect, tmp_path: Path) -> None:
    caller = connect(echo)
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    other.connect(str(tmp_path / "0.sock"))
    caller.turn()
    other.sendall(packed(infer(5, rows=8)))
    other.close()
    caller.send(infer(6))
    frames = caller.received()
    while not frames:
        caller.turn()
        frames = caller.received()
    assert [(frame.request_id, frame.rows) for frame in frames] == [(6, 1)]


def test_a_shadow_waits_until_there_is_nothing_else_to_do(connect: Connect) -> None:
    passes = Passes(passes=2)
    caller = connect(passes.run, profile=passes.profile)
    shadow = infer(1, rows=5)._replace(kind=Kind.SHADOW)
    caller.send(shadow, infer(2), profile_frame(3))
    caller.turn()
    caller.send(infer(4, rows=2))
    caller.turn()
    assert passes.events == ["batch of 1", "pass 0", "batch of 2", "pass 1"]
    caller.turn()
    assert passes.events[-1] == "batch of 5"
    frames = caller.received()
    assert [frame.request_id for frame in frames] == [2, 4, 3, 1]
    assert (frames[-1].kind, frames[-1].rows, frames[-1].batch_rows) == (Kind.RESULT, 5, 5)


def test_a_large_shadow_is_computed_a_batch_at_a_time_while_there_is_nothing_else_to_do(connect: Connect) -> None:
    sizes = Sizes(lambda: caller.send(infer(2)))
    caller = connect(sizes.run, max_batch_rows=4)
    shadow = numbered(1, rows=10)._replace(kind=Kind.SHADOW)
    caller.send(shadow)
    while len(sizes.seen) < 4:
        caller.turn()
    frames = caller.received()
    assert sizes.seen == [4, 1, 4, 2]
    assert [(frame.request_id, frame.rows, frame.batch_rows) for frame in frames] == [(2, 1, 1), (1, 10, 4)]
    assert bytes(frames[1].payload) == shadow.payload


def test_a_large_shadow_that_fails_or_is_cancelled_is_computed_no_further(connect: Connect) -> None:
    def fail() -> None:
        raise RuntimeError("at fault")

    sizes = Sizes(lambda: caller.send(Frame(Kind.CANCEL, 1, b"")), fail)
    caller = connect(sizes.run, max_batch_rows=4)
    for number in (1, 2):
        caller.send(infer(number, rows=10)._replace(kind=Kind.SHADOW))
        while len(sizes.seen) < number:
            caller.turn()
    caller.send(infer(3))
    caller.turn()
    kinds = [(frame.kind, frame.request_id) for frame in caller.received()]
    assert kinds == [(Kind.CANCELLED, 1), (Kind.ERROR, 2), (Kind.RESULT, 3)]
    assert sizes.seen == [4, 4, 1]
    assert not caller.worker._shadows


def test_a_shadow_whose_time_is_up_is_not_computed(connect: Connect) -> None:
    caller = connect(echo)
    caller.send(infer(1, deadline_ns=1)._replace(kind=Kind.SHADOW))
    caller.turn()
    caller.turn()
    (frame,) = caller.received()
    assert bytes(frame.payload).startswith(b"deadline_exceeded\n")


def test_a_cancelled_shadow_is_let_go_while_there_is_always_something_else_to_do(connect: Connect) -> None:
    passes = Passes()
    caller = connect(passes.run)
    for number in range(3):
        shadow = infer(number, rows=5)._replace(kind=Kind.SHADOW)
        caller.send(shadow, infer(10 + number), Frame(Kind.CANCEL, number, b""))
        caller.turn()
    assert {frame.request_id for frame in caller.received() if frame.kind == Kind.CANCELLED} == {0, 1, 2}
    caller.send(infer(20))
    caller.turn()
    caller.send(infer(21)._replace(kind=Kind.SHADOW))
    caller.turn()
    caller.turn()
    assert passes.events == ["batch of 1"] * 5
    assert [frame.request_id for frame in caller.received()] == [20, 21]


class Passes:
    """An engine and a profiler that only write down what they are asked for."""

    def __init__(self, passes: int = 4) -> None:
        self.events: list[str] = []
        self._passes = passes

    def run(self, rows: Tensor, backend: str) -> Tensor:  # noqa: ARG002
        self.events.append(f"batch of {len(rows)}")
        return rows.clone()

    def profile(self, rows: int, backend: str, trace: Path) -> Generator[None, None, dict[str, object]]:
        for index in range(self._passes):
            self.events.append(f"pass {index}")
            if index < self._passes - 1:
                yield
        return {"rows": rows, "backend": backend, "trace": str(trace)}


def test_no_batch_waits_for_more_than_one_pass_of_a_profile(connect: Connect) -> None:
    passes = Passes()
    caller = connect(passes.run, profile=passes.profile)
    caller.send(profile_frame(1), infer(2), infer(3, rows=2))
    caller.turn()
    caller.turn()
    caller.send(infer(4))
    caller.turn()
    caller.turn()
    assert passes.events == ["batch of 3", "pass 0", "pass 1", "batch of 1", "pass 2", "pass 3"]
    frames = caller.received()
    assert [(frame.kind, frame.request_id) for frame in frames] == [
        (Kind.RESULT, 2),
        (Kind.RESULT, 3),
        (Kind.RESULT, 4),
        (Kind.PROFILED, 1),
    ]
    assert orjson.loads(frames[-1].payload) == {"rows": 3, "backend": "fused", "trace": "trace.json"}


def test_a_profile_ends_with_its_caller_its_deadline_or_its_wish(connect: Connect, tmp_path: Path) -> None:
    passes = Passes(passes=1000)
    caller = connect(passes.run, profile=passes.profile)
    caller.send(profile_frame(1), Frame(Kind.CANCEL, 1, b""), profile_frame(2, deadline_ns=1))
    caller.turn()
    cancelled, late = caller.received()
    assert (cancelled.kind, cancelled.request_id) == (Kind.CANCELLED, 1)
    assert bytes(late.payload).startswith(b"deadline_exceeded\n")
    other = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    other.connect(str(tmp_path / "0.sock"))
    caller.turn()
    other.sendall(packed(profile_frame(5)))
    caller.turn()
    assert passes.events == ["pass 0"]
    other.close()
    caller.send(infer(6))
    frames: list[Frame] = []
    while not frames:
        caller.turn()
        frames = caller.received()
    caller.send(infer(7))
    caller.turn()
    before = len(passes.events)
    caller.send(infer(8))
    caller.turn()
    assert passes.events[before:] == ["batch of 1"]


def test_a_profile_that_fails_says_why_and_the_next_request_is_answered(connect: Connect) -> None:
    def fails(rows: int, backend: str, trace: Path) -> Profiling:
        yield
        raise OutOfMemoryError(rows, "cuda:0")

    caller = connect(echo, profile=fails)
    caller.send(profile_frame(1), infer(2))
    caller.turn()
    caller.turn()
    frames = {frame.request_id: frame for frame in caller.received()}
    assert bytes(frames[1].payload).startswith(b"backend_unavailable\ncuda:0 has not enough free memory for 3 rows")
    assert frames[2].kind == Kind.RESULT
