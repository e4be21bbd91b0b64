"""A worker's loop, turned by hand, whose batches go to a device that does nothing until it is made to."""

import contextlib
import random
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.backends.eager import Eager
from models.engine import Engine, load_engine
from models.errors import DeviceLostError, OutOfMemoryError
from models.gpu.plan import write_model
from models.staging import HostStreams, Passage, Staging, Streams
from service.batcher import Waiting
from service.flights import Flights
from service.wire import Frame, Kind
from tests.models.lazy_streams import LazyStreams
from tests.service.caller import BACKENDS, HOUR_NS, Caller, infer, profile_frame

MAX_ROWS = 4
Connect = Callable[..., Caller]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return load_engine(write_model(tmp_path, (2, 3, 1)), "cpu", "float32", BACKENDS, 1)


@pytest.fixture
def connect(tmp_path: Path, engine: Engine) -> Iterator[Connect]:
    callers: list[Caller] = []

    def make(streams: Streams, max_batch_rows: int = MAX_ROWS, **arguments: object) -> Caller:
        ring = Staging(engine, max_batch_rows, streams)
        path = tmp_path / f"{len(callers)}.sock"
        callers.append(Caller(path, engine.run, max_batch_rows, staging=ring, **arguments))  # type: ignore[arg-type]
        return callers[-1]

    yield make
    for caller in callers:
        caller.close()


def in_air(caller: Caller) -> int:
    assert caller.worker._flights is not None
    return len(caller.worker._flights)


def assert_answered(engine: Engine, frames: list[Frame]) -> None:
    """Each frame is a result of its own request's rows, which hold its number."""
    for frame in frames:
        assert frame.kind == Kind.RESULT, bytes(frame.payload)
        rows = torch.full((frame.rows, 2), float(frame.request_id))
        got = torch.frombuffer(bytearray(frame.payload), dtype=torch.float32).view(frame.rows, -1)
        torch.testing.assert_close(got, engine.run(rows, BACKENDS[frame.backend]), rtol=1e-5, atol=1e-5)


def test_each_gets_its_own_rows_whatever_the_device_does_first(connect: Connect, engine: Engine) -> None:
    for seed in range(10):
        chosen, streams = random.Random(seed), LazyStreams(seed)
        caller = connect(streams)
        expected: list[int] = []
        got: list[Frame] = []
        for number in range(1, 61):
            expected.append(number)
            rows = chosen.choice((1, 2, 3, 4, 5, 11))  # the ring takes no more than MAX_ROWS at a time
            caller.send(infer(number, rows=rows, backend=chosen.randint(0, 1)))
            if chosen.random() < 0.5:
                caller.turn()
            while streams.ready and chosen.random() < 0.7:
                streams.step()
            got += caller.received()
        while len(got) < len(expected):
            caller.turn()
            streams.synchronize()
            got += caller.received()
        assert sorted(frame.request_id for frame in got) == expected
        assert_answered(engine, got)


def test_what_comes_while_a_batch_computes_is_one_batch_afterwards(connect: Connect, engine: Engine) -> None:
    streams = LazyStreams()
    caller = connect(streams)
    for number in (1, 2, 3):
        caller.send(infer(number))
        caller.turn()
    assert (in_air(caller), caller.received()) == (1, [])
    while streams.ready != ["out"]:
        streams.step()
    caller.turn()
    assert in_air(caller) == 2  # the next one is on its way while the result of the first is
    streams.synchronize()
    caller.turn()
    frames = caller.received()
    assert [(frame.request_id, frame.batch_rows) for frame in frames] == [(1, 1), (2, 2), (3, 2)]
    assert_answered(engine, frames)


def test_a_batch_that_cannot_grow_goes_in_while_another_computes(connect: Connect, engine: Engine) -> None:
    streams = LazyStreams()
    caller = connect(streams)
    for number in (1, 2, 3, 4):
        caller.send(infer(number, rows=MAX_ROWS))
        caller.turn()
    assert in_air(caller) == 3  # as many as there are buffers for
    while streams.ready != ["in", "compute", "out"]:
        streams.step(streams.ready[-1] if "out" not in streams.ready else "in")
    streams.step("out")
    caller.turn()
    assert [frame.request_id for frame in caller.received()] == [1]  # while others compute
    assert in_air(caller) == 3
    streams.synchronize()
    caller.turn()
    frames = caller.received()
    assert [frame.request_id for frame in frames] == [2, 3, 4]
    assert_answered(engine, frames)


def test_a_batch_that_does_not_fit_is_computed_in_parts_and_what_never_fits_is_told(
    connect: Connect, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Eager.__call__

    def holds_two(backend: Eager, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return call(backend, x)

    caller = connect(HostStreams(), 64)
    with monkeypatch.context() as patched:
        patched.setattr(Eager, "__call__", holds_two)
        caller.send(*(infer(number) for number in range(1, 20)), infer(20, rows=3))
        while in_air(caller) or len(caller.worker._batcher) or not (frames := caller.received()):
            caller.turn()
    told = frames.pop([frame.request_id for frame in frames].index(20))
    assert bytes(told.payload).startswith(b"backend_unavailable\ncpu has not enough free memory for 3 rows")
    assert sorted(frame.request_id for frame in frames) == list(range(1, 20))
    assert max(frame.batch_rows for frame in frames) == 2
    assert_answered(engine, frames)


def test_what_does_not_fit_beside_another_batch_is_tried_again_without_it(
    connect: Connect, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = Staging.submit
    refused: list[int] = []

    def alone(ring: Staging, payloads: list[bytes], rows: int, backend: str) -> object:
        if in_air(caller):
            refused.append(rows)
            raise OutOfMemoryError(rows, "cuda:0")
        return submit(ring, payloads, rows, backend)

    monkeypatch.setattr(Staging, "submit", alone)
    streams = LazyStreams()
    caller = connect(streams)
    caller.send(infer(1, rows=MAX_ROWS))
    caller.turn()
    caller.send(infer(2, rows=2), infer(3, rows=2))
    caller.turn()
    streams.synchronize()
    caller.turn()
    frames = caller.received()
    assert refused == [4]
    assert [(frame.request_id, frame.batch_rows) for frame in frames] == [(1, 4), (2, 4), (3, 4)]
    assert_answered(engine, frames)


def test_a_run_that_raises_fails_the_request_at_fault_alone(
    connect: Connect, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Eager.__call__
    refused: list[int] = []

    def refusing(backend: Eager, x: Tensor) -> Tensor:
        if (x == 3).any():
            refused.append(len(x))
            raise torch.AcceleratorError("CUDA error: invalid configuration argument")
        return call(backend, x)

    caller = connect(HostStreams())
    with monkeypatch.context() as patched:
        patched.setattr(Eager, "__call__", refusing)
        caller.send(*(infer(number) for number in range(1, 5)))
        frames: list[Frame] = []
        while len(frames) < 4:
            caller.turn()
            frames += caller.received()
    told = frames.pop([frame.request_id for frame in frames].index(3))
    assert bytes(told.payload) == b"internal\nAcceleratorError: CUDA error: invalid configuration argument"
    assert sorted(frame.request_id for frame in frames) == [1, 2, 4]
    assert_answered(engine, frames)
    assert refused == [4, 1]  # together with the others, and alone
    assert len(caller.worker._flights._staging._free) == 3  # type: ignore[union-attr]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("batches", [3, 5])
def test_a_large_request_with_a_batch_that_fails_is_told_once_whatever_of_it_is_in_the_air(
    connect: Connect, engine: Engine, monkeypatch: pytest.MonkeyPatch, batches: int, failing: int
) -> None:
    result = Passage.result
    at_fault: list[Passage] = []

    def fails(passage: Passage) -> Tensor:
        if len(at_fault) < failing:
            at_fault.append(passage)
            raise RuntimeError("at fault")
        return result(passage)

    monkeypatch.setattr(Passage, "result", fails)
    streams = LazyStreams()
    caller = connect(streams)
    caller.send(infer(1, rows=batches * MAX_ROWS))
    for _ in range(3):
        caller.turn()
    assert in_air(caller) == 3
    streams.synchronize()
    caller.turn()
    (told,) = caller.received()
    assert bytes(told.payload) == b"internal\nRuntimeError: at fault"
    assert (in_air(caller), len(caller.worker._batcher)) == (0, 0)
    caller.send(infer(2))
    while in_air(caller) == 0:
        caller.turn()
    streams.synchronize()
    caller.turn()
    assert_answered(engine, caller.received())


@pytest.mark.parametrize(("batches", "kind"), [(3, Kind.RESULT), (4, Kind.CANCELLED)])
def test_a_large_request_is_cancelled_while_some_of_it_waits_and_answered_once_all_is_in_the_air(
    connect: Connect, batches: int, kind: Kind
) -> None:
    streams = LazyStreams()
    caller = connect(streams)
    caller.send(infer(1, rows=batches * MAX_ROWS))
    for _ in range(3):
        caller.turn()
    caller.send(Frame(Kind.CANCEL, 1, b""))
    caller.turn()
    streams.synchronize()
    caller.turn()
    (frame,) = caller.received()
    assert (frame.kind, frame.rows) == (kind, batches * MAX_ROWS if kind == Kind.RESULT else 0)
    assert in_air(caller) == 0
    assert caller.worker._flights is not None
    assert len(caller.worker._flights._staging._free) == 3


def turn_until_told(caller: Caller) -> None:
    while not caller.received():
        caller.turn()


LOST = "cpu fails every call of this process from now on: AcceleratorError: CUDA error: an illegal memory access"


def broken_while_one_computes(streams: LazyStreams, caller: Caller) -> None:
    caller.send(infer(1))
    caller.turn()
    streams.is_broken = True


def broken_before_anything_is_handed_over(streams: LazyStreams, caller: Caller) -> None:
    streams.is_broken = True
    caller.send(infer(1), infer(2))


def broken_by_what_a_full_ring_waits_for(streams: LazyStreams, caller: Caller) -> None:
    for number in (1, 2, 3, 4):
        caller.send(infer(number, rows=MAX_ROWS))
        caller.turn()
    step = streams.step

    def breaking(stream: str | None = None) -> None:
        step(stream)
        streams.is_broken = True

    streams.step = breaking  # type: ignore[method-assign]
    streams.step()


def broken_while_a_profile_waits(streams: LazyStreams, caller: Caller) -> None:
    caller.send(profile_frame(1), infer(2))
    step = streams.step

    def breaking(stream: str | None = None) -> None:
        step(stream)
        streams.is_broken = True

    streams.step = breaking  # type: ignore[method-assign]


def broken_by_a_profile(streams: LazyStreams, caller: Caller) -> None:
    caller.send(profile_frame(1, rows=0))


def broken_before_a_shadow(streams: LazyStreams, caller: Caller) -> None:
    streams.is_broken = True
    caller.send(infer(1)._replace(kind=Kind.SHADOW))


@pytest.mark.parametrize(
    "break_device",
    [
        broken_while_one_computes,
        broken_before_anything_is_handed_over,
        broken_by_what_a_full_ring_waits_for,
        broken_while_a_profile_waits,
        broken_by_a_profile,
        broken_before_a_shadow,
    ],
)
def test_a_device_that_fails_for_good_ends_the_loop_and_answers_nobody_wrongly(
    tmp_path: Path, engine: Engine, break_device: Callable[[LazyStreams, Caller], None]
) -> None:
    streams = LazyStreams()

    def run(rows: Tensor, backend: str) -> Tensor:
        streams.require_intact()
        return engine.run(rows, backend)

    def profile(rows: int, backend: str, trace: Path) -> Generator[None, None, dict[str, object]]:
        streams.is_broken = streams.is_broken or rows == 0
        streams.require_intact()
        yield
        return {}

    ring = Staging(engine, MAX_ROWS, streams)
    with contextlib.closing(Caller(tmp_path / "socket", run, MAX_ROWS, profile=profile, staging=ring)) as caller:
        break_device(streams, caller)
        with pytest.raises(DeviceLostError, match=LOST):
            turn_until_told(caller)
        assert caller.received() == []


def test_a_profile_runs_while_nothing_is_in_the_air(connect: Connect, engine: Engine) -> None:
    seen: list[int] = []

    def profile(rows: int, backend: str, trace: Path) -> Generator[None, None, dict[str, object]]:
        for _ in range(2):
            seen.append(in_air(caller))
            yield
        return {}

    caller = connect(LazyStreams(), profile=profile)
    caller.send(profile_frame(1), infer(2))
    for number in (3, 4):
        caller.turn()
        caller.send(infer(number))
    caller.turn()
    frames = caller.received()
    assert seen == [0, 0]
    assert [frame.request_id for frame in frames] == [2, 3, 4, 1]
    assert_answered(engine, frames[:3])


def test_a_shadow_waits_until_nothing_is_in_the_air(connect: Connect, engine: Engine) -> None:
    streams = LazyStreams()
    caller = connect(streams)
    caller.send(infer(1)._replace(kind=Kind.SHADOW), infer(2))
    for _ in range(3):
        caller.turn()
    assert caller.received() == []
    streams.synchronize()
    caller.turn()
    caller.turn()
    frames = caller.received()
    assert [frame.request_id for frame in frames] == [2, 1]
    assert_answered(engine, frames)


def test_a_caller_that_is_gone_leaves_the_others_their_answers(connect: Connect, engine: Engine) -> None:
    streams = LazyStreams()
    caller = connect(streams)
    caller.send(infer(1))
    caller.turn()
    caller._socket.close()
    while caller.worker.listener.clients:
        caller.turn()
    streams.synchronize()
    caller.turn()
    assert in_air(caller) == 0
    assert caller.worker._flights is not None
    assert len(caller.worker._flights._staging._free) == 3


def test_a_batch_computes_from_the_end_of_the_one_before(engine: Engine) -> None:
    streams, now_ns = LazyStreams(), 10
    ring = Staging(engine, MAX_ROWS, streams)
    times: list[tuple[int, int, int]] = []

    def answer(batch: object, taken_ns: int, start_ns: int, took_ns: int, outputs: memoryview) -> None:
        times.append((taken_ns, start_ns, took_ns))

    flights: Flights[str] = Flights(ring, BACKENDS, answer, lambda *_: None, lambda: now_ns)
    rows = np.zeros((1, 2), dtype=np.float32).tobytes()
    flights.begin([Waiting("caller", 1, 0, 1, rows, 0, HOUR_NS)], 5)
    now_ns = 20
    flights.begin([Waiting("caller", 2, 0, 1, rows, 0, HOUR_NS)], 15)
    for stream in ("in", "compute", "out"):
        streams.step(stream)
    now_ns = 100
    flights.land()
    assert times == [(5, 10, 90)]
    streams.synchronize()
    now_ns = 130
    flights.land()
    assert times[1:] == [(15, 100, 30)]
    now_ns = 200
    flights.begin([Waiting("caller", 3, 0, 1, rows, 0, HOUR_NS)], 190)
    streams.synchronize()
    now_ns = 250
    flights.land()
    assert times[2:] == [(190, 200, 50)]  # from its own hand-over, where nothing was in the air


def test_values_that_are_not_finite_change_no_neighbour(connect: Connect) -> None:
    caller = connect(HostStreams())
    rows = np.array([[1, 2], [np.nan, 1], [np.inf, 1], [0.5, 0.25]], dtype=np.float32)
    for number, row in enumerate(rows):
        caller.send(Frame(Kind.INFER, number, row.tobytes(), 0, 1, 0, time.monotonic_ns() + HOUR_NS))
    caller.turn()
    caller.turn()
    frames = caller.received()
    assert [bool(np.isfinite(np.frombuffer(it.payload, dtype=np.float32)).all()) for it in frames] == [
        *(True, False, False, True)
    ]


def test_outputs_stay_as_they_are_while_they_are_answered(engine: Engine) -> None:
    ring = Staging(engine, MAX_ROWS, HostStreams())
    free: list[int] = []
    flights: Flights[str] = Flights(ring, BACKENDS, lambda *_: free.append(len(ring._free)), lambda *_: None)
    rows = np.zeros((1, 2), dtype=np.float32).tobytes()
    flights.begin([Waiting("caller", 1, 0, 1, rows, 0, HOUR_NS)], 0)
    flights.land()
    assert free == [ring.depth - 1]
    assert ring.has_room
    assert len(flights) == 0
