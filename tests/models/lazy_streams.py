"""A device that does nothing until it is made to, and then whatever the order of streams and events allows."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class LazyEvent:
    """Passes once its work is done; whoever waits for it makes the device work, in a random legal order."""

    def __init__(self, streams: "LazyStreams") -> None:
        self._streams = streams
        self.is_passed = False

    def query(self) -> bool:
        self._streams.require_intact()
        return self.is_passed

    def synchronize(self) -> None:
        self._streams.require_intact()
        while not self.is_passed:
            self._streams.step()
            self._streams.require_intact()


class LazyStreams:
    """See `models.staging.Streams`; buffers hold NaN until they are written.

    Once `is_broken`, every call fails, as those of a CUDA context do after a fault on the device.
    """

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.log: list[str] = []
        self.is_broken = False
        self._queues: dict[str, deque[tuple[Callable[[], object], list[Any], LazyEvent]]] = {
            name: deque() for name in ("in", "compute", "out")
        }

    def require_intact(self) -> None:
        if self.is_broken:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nSearch for the code.")

    def pinned(self, rows: int, width: int) -> Tensor:
        return torch.full((rows, width), float("nan"))

    def enqueue(self, stream: str, work: Callable[[], object], after: Sequence[Any] = ()) -> LazyEvent:
        self.require_intact()
        event = LazyEvent(self)
        self._queues[stream].append((work, list(after), event))
        return event

    @property
    def ready(self) -> list[str]:
        """The streams whose next work may be done now."""
        return [name for name, queue in self._queues.items() if queue and all(it.query() for it in queue[0][1])]

    def step(self, stream: str | None = None) -> None:
        """Do the next work of one stream, a random one by default."""
        name = stream or self.random.choice(self.ready)
        work, _, event = self._queues[name].popleft()
        with torch.inference_mode():
            work()
        self.log.append(name)
        event.is_passed = True

    def synchronize(self) -> None:
        self.require_intact()
        while self.ready:
            self.step()
            self.require_intact()
