"""Batches through a ring of buffers, in whatever order a device may do the work; on a GPU, in the order that it does.

`LazyStreams` does everything that a device does, late: a buffer that is reused before its event holds another batch's
numbers by then.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models import backends, staging
from models.backends import Backend
from models.backends.eager import Eager
from models.backends.graphs import Bucketed, Replay
from models.config import ModelConfig
from models.engine import Engine, load_engine
from models.errors import BackendError, InputError, OutOfMemoryError, UnknownBackendError
from models.staging import DEPTH, HostStreams, Passage, Staging, Streams, pinned_bytes, staging_for
from tests.models.lazy_streams import LazyStreams

Load = Callable[..., Engine]

WIDTH_IN, MAX_ROWS = 5, 8
BACKENDS = ("eager", "fused")


class Graphs(Bucketed):
    """The module, run from an input of its own into an output of its own, as a CUDA graph is."""

    implementation = "torch"

    @classmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        return None

    def runner(self, size: int) -> Callable[[Tensor], Tensor]:
        held = self.zeros(size)
        result: Tensor = self.model(held).clone()
        return Replay(held, result, lambda: result.copy_(self.model(held)))


@pytest.fixture
def load(
    tiny: Callable[..., ModelConfig], write_model: Callable[[ModelConfig], Path], monkeypatch: pytest.MonkeyPatch
) -> Load:
    """Load a model whose fused backend, on a CPU, is `Graphs`."""
    found = backends.find

    def find(name: str, device: torch.device) -> type[Backend] | None:
        return Graphs if name == "fused" and device.type == "cpu" else found(name, device)

    monkeypatch.setattr("models.engine.find", find)

    def make(dtype: str = "float32", device: str = "cpu") -> Engine:
        engine = load_engine(write_model(tiny(in_features=WIDTH_IN)), device, dtype, BACKENDS)
        engine.warm_up(MAX_ROWS)
        return engine

    return make


def drawn(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, WIDTH_IN, generator=torch.Generator().manual_seed(seed))


def bytes_of(rows: Tensor) -> bytes:
    return rows.numpy().tobytes()


def submitted(ring: Staging, rows: Tensor, backend: str = "fused") -> Passage:
    return ring.submit([bytes_of(rows)], len(rows), backend)


def plain(engine: Engine, rows: Tensor, backend: str = "fused") -> Tensor:
    return engine.run(rows, backend).float().cpu()


def wrong_answers(engine: Engine, streams: Streams, step: Callable[[], None], seed: int) -> list[str]:
    """Send 60 batches of random sizes and backends, taking results late or at once, and say which are wrong.

    Now and then the engine is run beside the ring, as profiles are. `step` makes the device work, or does nothing.
    """
    chosen = random.Random(seed)
    ring = Staging(engine, MAX_ROWS, streams)
    in_air: deque[tuple[Tensor, str, Passage]] = deque()
    got: list[tuple[Tensor, str, Tensor]] = []

    def take() -> None:
        rows, backend, passage = in_air.popleft()
        got.append((rows, backend, passage.result().clone()))
        passage.release()

    def beside(rows: Tensor, backend: str) -> None:
        got.append((rows, backend, plain(engine, rows, backend)))

    for number in range(60):
        while not ring.has_room:
            take()
        rows, backend = drawn(chosen.randint(1, MAX_ROWS), number), chosen.choice(BACKENDS)
        in_air.append((rows, backend, submitted(ring, rows, backend)))
        if chosen.random() < 0.2:
            others = drawn(chosen.randint(1, MAX_ROWS), 1000 + number)
            streams.enqueue("compute", lambda others=others, backend=backend: beside(others, backend))  # type: ignore[misc]
        for _ in range(chosen.randint(0, 6)):
            step()
        if in_air and (in_air[0][2].is_done or chosen.random() < 0.2):
            take()
    while in_air:
        take()
    streams.synchronize()
    return [
        f"{index}: {len(rows)} rows, {backend}"
        for index, (rows, backend, result) in enumerate(got)
        if not torch.equal(result, plain(engine, rows, backend))
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_batch_gets_its_own_answer_whatever_the_device_does_first(load: Load, dtype: str) -> None:
    engine = load(dtype)
    for seed in range(20):
        streams = LazyStreams(seed)
        assert wrong_answers(engine, streams, lambda streams=streams: streams.ready and streams.step(), seed) == []  # type: ignore[misc]


def test_where_a_host_is_all_there_is_the_answers_are_the_same(load: Load) -> None:
    assert wrong_answers(load(), HostStreams(), lambda: None, 0) == []


def test_one_batch_goes_in_while_one_computes_and_one_goes_out(load: Load) -> None:
    streams = LazyStreams()
    ring = Staging(load(), MAX_ROWS, streams)
    passages = [submitted(ring, drawn(4, number)) for number in range(3)]
    for stream in ("compute", "in", "compute", "in"):  # the first is computed, the second is in
        streams.step(stream)
    assert streams.ready == ["in", "compute", "out"]
    assert [passage.is_computed for passage in passages] == [True, False, False]
    assert not passages[0].is_done


def test_rows_cross_to_a_graphs_own_input_where_nothing_computes(load: Load) -> None:
    engine, streams = load(), LazyStreams()
    ring = Staging(engine, MAX_ROWS, streams)
    static_input = engine.static_input("fused", 3)
    assert static_input is not None
    first, second = drawn(3, 1), drawn(3, 2)
    submitted(ring, first)
    streams.step("compute")  # what was before
    streams.step("in")
    assert torch.equal(static_input, first)
    submitted(ring, second)
    streams.step("in")
    assert torch.equal(static_input, first)  # the first may still be read from it


def test_rows_of_another_dtype_are_converted_on_the_device_in_the_pass_that_a_graph_needs(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load("bfloat16")
    given: list[Tensor] = []
    call = Graphs.__call__

    def noting(plan: Graphs, x: Tensor) -> Tensor:
        given.append(x)
        return call(plan, x)

    monkeypatch.setattr(Graphs, "__call__", noting)
    passage = submitted(Staging(engine, MAX_ROWS, HostStreams()), drawn(3))
    static_input = engine.static_input("fused", 3)
    assert static_input is not None
    assert given[0].data_ptr() == static_input.data_ptr()
    assert passage.result().dtype == torch.float32


def test_only_a_captured_bucket_has_an_input_of_its_own(load: Load) -> None:
    engine = load()
    assert engine.static_input("eager", 3) is None
    assert engine.static_input("fused", MAX_ROWS + 1) is None  # goes through in parts
    with pytest.raises(UnknownBackendError):
        engine.static_input("compiled", 3)


def test_payloads_may_be_anything_that_holds_bytes_and_are_not_read_after_the_call(load: Load) -> None:
    engine, streams = load(), LazyStreams()
    ring = Staging(engine, MAX_ROWS, streams)
    rows = drawn(4)
    raw = bytes_of(rows)
    size = len(raw) // 4
    changed = bytearray(raw[size : 3 * size])
    parts: Sequence[bytes | bytearray | memoryview] = (raw[:size], changed, memoryview(raw)[3 * size :])
    passage = ring.submit(parts, 4, "fused")
    changed[:] = bytes(len(changed))
    assert torch.equal(passage.result(), plain(engine, rows))


def test_what_is_not_finite_passes_through_and_stays_in_its_row(load: Load) -> None:
    rows = drawn(3)
    rows[1] = float("nan")
    passage = submitted(Staging(load(), MAX_ROWS, HostStreams()), rows)
    assert passage.result().isfinite().all(1).tolist() == [True, False, True]


def test_no_more_batches_than_there_are_buffers(load: Load) -> None:
    ring = Staging(load(), MAX_ROWS, LazyStreams())
    passages = [submitted(ring, drawn(1)) for _ in range(ring.depth)]
    assert not ring.has_room
    with pytest.raises(RuntimeError, match="at most 3 batches at a time"):
        submitted(ring, drawn(1))
    passages[1].release()
    passages[1].release()
    assert ring.has_room
    submitted(ring, drawn(1))
    assert not ring.has_room


def test_buffers_are_given_back_after_the_last_work_on_them(load: Load) -> None:
    passage = submitted(Staging(load(), MAX_ROWS, LazyStreams()), drawn(1))
    passage.release()
    assert passage.is_done
    with pytest.raises(RuntimeError, match="expected its result to be read before its release"):
        passage.result()


def test_pinned_memory_is_bounded_and_one_batch_always_fits(load: Load) -> None:
    engine = load()
    one = pinned_bytes(MAX_ROWS, WIDTH_IN) + pinned_bytes(MAX_ROWS, engine.config.width_out)
    assert (pinned_bytes(8, 5), pinned_bytes(8, 4), pinned_bytes(1, 1)) == (256, 128, 4)
    for limit, depth in ((10 * one, DEPTH), (3 * one, 3), (3 * one - 1, 2), (2 * one - 1, 1), (1, 1)):
        ring = Staging(engine, MAX_ROWS, HostStreams(), limit)
        assert (ring.depth, ring.bytes) == (depth, depth * one)
    passage = submitted(ring, drawn(MAX_ROWS))
    assert not ring.has_room
    assert torch.equal(passage.result(), plain(engine, drawn(MAX_ROWS)))


def test_memory_that_is_not_to_be_had_is_told(load: Load) -> None:
    with pytest.raises(BackendError, match=r"expected \d+ bytes of pinned memory for batches of \d+ rows, and"):
        Staging(load(), 1 << 56, HostStreams())


@pytest.mark.parametrize("error", [OutOfMemoryError(3, "cuda:0"), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_batch_that_does_not_fit_gives_its_buffers_back_and_a_smaller_one_runs(
    load: Load, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, call = load(), Eager.__call__

    def holds_two(backend: Eager, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise error
        return call(backend, x)

    monkeypatch.setattr(Eager, "__call__", holds_two)
    ring = Staging(engine, MAX_ROWS, HostStreams())
    for _ in range(2 * ring.depth):
        with pytest.raises(OutOfMemoryError, match="not enough free memory for 3 rows"):
            submitted(ring, drawn(3), "eager")
    assert torch.equal(submitted(ring, drawn(2), "eager").result(), plain(engine, drawn(2), "eager"))


def test_what_fails_is_waited_for_before_its_buffers_go_to_another(load: Load) -> None:
    class Failing(LazyStreams):
        def enqueue(self, stream: str, *arguments: object) -> object:  # type: ignore[override]
            if stream == "compute" and self._queues["in"]:
                raise RuntimeError("the launch")
            return super().enqueue(stream, *arguments)  # type: ignore[arg-type]

    streams = Failing()
    ring = Staging(load(), MAX_ROWS, streams)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="the launch"):
        submitted(ring, drawn(1))
    assert streams.log[-1] == "in"  # the copy that was on its way is done
    assert streams.ready == []


@pytest.mark.parametrize(
    ("size", "rows"), [(4 * WIDTH_IN * 2, 3), (4 * WIDTH_IN * 2 + 1, 2), (0, 0), (4 * WIDTH_IN * 9, 9), (0, -1)]
)
def test_payloads_that_are_not_so_many_rows_are_refused(load: Load, size: int, rows: int) -> None:
    ring = Staging(load(), MAX_ROWS, HostStreams())
    with pytest.raises(InputError, match=f"expected 1 to 8 rows of 5 float32 numbers, got {size} bytes for {rows}"):
        ring.submit([bytes(size)], rows, "fused")
    assert len(ring._free) == ring.depth


def test_a_backend_that_is_not_there_is_refused(load: Load) -> None:
    ring = Staging(load(), MAX_ROWS, HostStreams())
    with pytest.raises(UnknownBackendError):
        submitted(ring, drawn(1), "compiled")
    assert len(ring._free) == ring.depth


@pytest.mark.parametrize("max_rows", [0, True, 1.5])
def test_a_ring_needs_a_positive_row_count(load: Load, max_rows: int) -> None:
    with pytest.raises(InputError, match="max_rows: expected a positive integer"):
        Staging(load(), max_rows, HostStreams())


def test_on_a_cpu_there_is_no_way_to_go(load: Load) -> None:
    assert staging_for(load(), MAX_ROWS) is None


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")


@pytest.mark.gpu
@pytest.mark.slow
@needs_a_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_on_a_gpu_every_batch_gets_its_own_answer(load: Load, dtype: str) -> None:
    engine = load(dtype, "cuda")
    for seed in range(5):
        assert wrong_answers(engine, staging.CUDAStreams(engine.device), lambda: None, seed) == []


@pytest.mark.gpu
@pytest.mark.slow
@needs_a_gpu
def test_on_a_gpu_the_buffers_are_pinned_and_a_batch_is_waited_for_by_nobody_but_its_result(load: Load) -> None:
    ring = staging_for(load("bfloat16", "cuda"), MAX_ROWS)
    assert ring is not None
    assert all(slot.host_in.is_pinned() and slot.host_out.is_pinned() for slot in ring._free)
    torch.cuda._sleep(1 << 30)  # type: ignore[no-untyped-call]  # what computes before
    passage = submitted(ring, drawn(3))
    assert not passage.is_computed
    assert passage.result().isfinite().all()
    assert passage.is_computed
    assert passage.is_done


@pytest.mark.gpu
@pytest.mark.slow
@needs_a_gpu
def test_on_a_gpu_a_batch_that_does_not_fit_is_refused_and_a_smaller_one_runs(load: Load) -> None:
    engine = load("float32", "cuda")
    many = 1 << 20  # a hidden layer of which takes 100 MB
    ring = staging_for(engine, many)
    assert ring is not None
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (32 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        for _ in range(2 * ring.depth):
            with pytest.raises(OutOfMemoryError):
                submitted(ring, drawn(many), "eager")
        passage = submitted(ring, drawn(2), "eager")
        assert torch.equal(passage.result(), plain(engine, drawn(2), "eager"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
