"""CUDA graphs: one for each power of two of rows, captured once and replayed."""

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from models.backends import Backend
from models.config import ModelConfig
from models.mlp import MLP


class Bucketed(Backend):
    """A backend that runs rows padded up to a power of two, each power by what `runner` makes."""

    def __init__(self, model: MLP, config: ModelConfig) -> None:
        super().__init__(model, config)
        self._replays: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def runner(self, size: int) -> Callable[[Tensor], Tensor]:
        """Make what runs from 1 to `size` rows; asked for once a size."""

    def sizes(self, max_rows: int) -> Sequence[int]:
        """See `Backend`; the buckets up to the one that holds `max_rows`."""
        return buckets(max_rows)

    def ready_for(self, size: int) -> None:
        """See `Backend`; makes what runs the bucket, but runs nothing."""
        self._replay(size)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Backend`; more rows than were readied for go through the largest bucket in parts."""
        if not self._replays:
            self._replay(bucket(x.shape[0]))
        largest = max(self._replays)
        parts = [x[start : start + largest] for start in range(0, x.shape[0], largest)]
        results = [self._replay(bucket(part.shape[0]))(part) for part in parts]
        return results[0] if len(results) == 1 else torch.cat(results)

    def static_input(self, rows: int) -> Tensor | None:
        """See `Backend`; the first rows of a graph's static input."""
        replay = self._replays.get(bucket(rows))
        return replay.static_input[:rows] if isinstance(replay, Replay) else None

    def _replay(self, size: int) -> Callable[[Tensor], Tensor]:
        if size not in self._replays:
            self._replays[size] = self.runner(size)
        return self._replays[size]


class Replay:
    """Replays a graph on as many rows as its input holds, or fewer.

    Padding rows hold what the last call left there, which does no harm: rows do not affect each other.

    Args:
        static_input: the graph's input; rows that are there already are not copied.
        result: the graph's output.
        replay: computes `result` from `static_input`.
    """

    def __init__(self, static_input: Tensor, result: Tensor, replay: Callable[[], object]) -> None:
        self.static_input = static_input
        self._result = result
        self._replay = replay

    def __call__(self, x: Tensor) -> Tensor:
        """Run (N, width_in)."""
        if x.data_ptr() != self.static_input.data_ptr():
            self.static_input[: x.shape[0]].copy_(x)
        self._replay()
        return self._result[: x.shape[0]].clone()


def captured(run: Callable[[Tensor], Tensor], static_input: Tensor, pool: Any = None) -> Replay:
    """Capture `run` on a bucket, `static_input`, as a CUDA graph; return what replays it on as many rows or fewer.

    Args:
        run: reads its argument and allocates its result.
        static_input: what it is captured on; kept.
        pool: a handle of `torch.cuda.graph_pool_handle`: memory for graphs that are never replayed at the same time.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
    """
    with torch.cuda.device(static_input.device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, then settles the allocator and the libraries' workspaces
                run(static_input)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads' CUDA calls must not invalidate the capture.
        with _uncollected(), torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
            result = run(static_input)

    return Replay(static_input, result, graph.replay)


def bucket(rows: int) -> int:
    """Return the power of two that `rows` is padded up to."""
    return 1 << (rows - 1).bit_length()


def buckets(max_rows: int) -> Sequence[int]:
    """Return the powers of two up to the first one that holds `max_rows`."""
    return [1 << power for power in range((max_rows - 1).bit_length() + 1)]


@contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend garbage collection, since finalising a kernel or a graph would invalidate the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
