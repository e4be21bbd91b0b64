"""One worker's loop, turned by hand, with a caller at the other end of a real socket."""

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
    patience = caller.worker.patience
    for rows in [1, 2] * 20:  # batches that take an hour whatever they hold, answered just now
        patience.note_answers(0, rows, rows, HOUR_NS + rows, time.monotonic_ns())
        for _ in range(rows):
            patience.note_arrival(time.monotonic_ns())
    patience.note_answers(0, 2, 2, HOUR_NS, time.monotonic_ns())
    caller.send(infer(1))
    caller.turn()
    assert caller.received() == []
    caller.send(infer(2))
    caller.turn()
    assert [(frame.request_id, frame.batch_rows) for frame in caller.received()] == [(1, 2), (2, 2)]


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
        assert frame.end_ns >= 50_000_000
        assert frame.start_ns + frame.batch_ns + frame.end_ns <= took_ns


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
