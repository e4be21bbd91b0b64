"""Moves batches to a GPU and back: through pinned buffers, with one transfer each way, while others compute.

::

    frames -> pinned, float32 -> device, float32 -> a graph's static input, or the engine's dtype
              one host copy      one transfer       one pass               |  Engine.run
    reply  <- pinned, float32 <- device, float32 <-------------------------+
              no host copy       one transfer

Each direction of transfer has a stream of its own, and computing has the engine's; events order them within a batch.
So a batch is copied in while the one before it computes and the one before that is copied out, as far as the ring of
buffers allows. float32 crosses, whatever the engine's dtype: the device converts it, in the same pass as a copy that a
graph needs anyway, and the host touches each number once.

Nothing here relies on the allocator's idea of streams. A batch owns its buffers, on the host and on the device, until
it is released, which waits for the last event after all of its work.

Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams.
"""

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from models.engine import Engine
from models.errors import BackendError, DeviceLostError, InputError, OutOfMemoryError, first_line

DEPTH = 3  # a batch copied in, one that computes, one copied out
STAGING_BYTES = 512 << 20  # pinned memory is taken from what the whole host can page
NUMBER_BYTES = 4  # float32

StreamName = Literal["in", "compute", "out"]


class Event(Protocol):
    """A point in a stream; `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether all work before it is done; a device that failed raises, here as in `synchronize`."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Streams(Protocol):
    """Does work in order within a stream, and concurrently with the other streams."""

    def pinned(self, rows: int, width: int) -> Tensor:
        """Make a float32 buffer on the host that the device reads and writes by itself."""

    def enqueue(self, stream: StreamName, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """Do `work` in a stream's turn and after some events; return the event that follows it."""

    def synchronize(self) -> None:
        """Wait for all work of all streams."""


class CUDAStreams:
    """Streams of a CUDA or ROCm device: two of its own for the transfers; what computes is the current one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copying = {name: torch.cuda.Stream(device) for name in ("in", "out")}  # type: ignore[no-untyped-call]

    def pinned(self, rows: int, width: int) -> Tensor:
        """See `Streams`."""
        return torch.empty(rows, width, dtype=torch.float32, pin_memory=True)

    def enqueue(self, stream: StreamName, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:
        """See `Streams`; `work` launches, and returns before the device is done."""
        with torch.cuda.device(self._device):
            target = self._copying.get(stream) or torch.cuda.current_stream()
            with torch.cuda.stream(target):
                for event in after:
                    target.wait_event(event)  # type: ignore[arg-type]  # one of its own
                work()
                done: Event = target.record_event()
        return done

    def synchronize(self) -> None:
        """See `Streams`."""
        torch.cuda.synchronize(self._device)


class HostStreams:
    """Streams of a host alone, where all work is done at once: for dry runs, and for tests without a device."""

    def pinned(self, rows: int, width: int) -> Tensor:
        """See `Streams`."""
        return torch.empty(rows, width, dtype=torch.float32)

    def enqueue(self, stream: StreamName, work: Callable[[], object], after: Sequence[Event] = ()) -> Event:  # noqa: ARG002
        """See `Streams`."""
        work()
        return _Passed()

    def synchronize(self) -> None:
        """See `Streams`."""


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class Slot:
    """The buffers of one batch, each as large as the largest batch needs; all are float32.

    Attributes:
        host_in: (rows, width_in), pinned; what the received payloads are written to.
        host_out: (rows, width_out), pinned; what results are read from.
        device_in: (rows, width_in), on the device.
        bytes_in: `host_in` as bytes.
    """

    def __init__(self, streams: Streams, rows: int, width_in: int, width_out: int, device: torch.device) -> None:
        self.host_in = streams.pinned(rows, width_in)
        self.host_out = streams.pinned(rows, width_out)
        self.device_in = torch.empty(rows, width_in, dtype=torch.float32, device=device)
        self.bytes_in = memoryview(self.host_in.numpy()).cast("B")  # type: ignore[arg-type]


class Passage:
    """A batch on its way; its buffers are its own until `release`.

    Attributes:
        rows: of the batch; the first so many of each buffer are its own.
        outputs: (rows, width_out), float32, on the device, from when the pass is launched until `release`.
        computed: passes when `outputs` is written, and the device is free for the next pass.
        done: passes when the outputs are on the host.
    """

    def __init__(self, slot: Slot, rows: int, give_back: Callable[[Slot], None]) -> None:
        self.rows = rows
        self.outputs: Tensor | None = None  # kept from being given to another while it is copied
        self.computed: Event = _Passed()
        self.done: Event = _Passed()
        self._slot: Slot | None = slot
        self._give_back = give_back
        self._is_awaited = False

    @property
    def is_computed(self) -> bool:
        """Whether the device is free for another batch; also where it failed, which the next call on it meets."""
        return _is_past(self.computed)

    @property
    def is_done(self) -> bool:
        """Whether `result` would return at once: the result is there, or the device failed."""
        return _is_past(self.done)

    def result(self) -> Tensor:
        """Wait for the result: (rows, width_out), float32, on the host; it is valid until `release`.

        Raises:
            RuntimeError: the device failed after the work was handed over, or the buffers are released.
        """
        if self._slot is None:
            raise RuntimeError("passage: expected its result to be read before its release, got it read after")
        self._is_awaited = True
        self.done.synchronize()
        return self._slot.host_out[: self.rows]

    def release(self) -> None:
        """Give the buffers back, after the last work on them; a second call does nothing."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        try:
            if not self._is_awaited:
                self.done.synchronize()
        finally:
            self.outputs = None
            self._give_back(slot)


def _is_past(event: Event) -> bool:
    try:
        return event.query()
    except RuntimeError:
        return True


class Staging:
    """Hands batches to an engine in two steps, `submit` and `Passage.result`; up to `depth` of them at a time.

    For one thread at a time, the engine's. The engine may be run beside it: computing stays in one stream.
    """

    def __init__(self, engine: Engine, max_rows: int, streams: Streams, max_bytes: int = STAGING_BYTES) -> None:
        """Allocate all buffers.

        Args:
            engine: what runs the batches.
            max_rows: the most rows of a batch.
            streams: the engine's device's.
            max_bytes: of pinned memory; what one batch needs is taken even where that is more.

        Raises:
            InputError: `max_rows` is not a positive integer.
            BackendError: there is not so much memory.
        """
        if not isinstance(max_rows, int) or isinstance(max_rows, bool) or max_rows < 1:
            raise InputError(f"max_rows: expected a positive integer, got {max_rows!r}")
        self._engine = engine
        self._streams = streams
        self._max_rows = max_rows
        width_in, width_out = engine.config.width_in, engine.config.width_out
        slot_bytes = pinned_bytes(max_rows, width_in) + pinned_bytes(max_rows, width_out)
        self.depth = max(1, min(DEPTH, max_bytes // slot_bytes))
        self.bytes = self.depth * slot_bytes
        try:
            slots = [Slot(streams, max_rows, width_in, width_out, engine.device) for _ in range(self.depth)]
        except (RuntimeError, MemoryError) as error:
            raise BackendError(
                f"staging: expected {self.bytes} bytes of pinned memory for batches of {max_rows} rows, and room on "
                f"{engine.device}, got {first_line(error)}; ask for smaller batches"
            ) from error
        streams.synchronize()  # what computed in the memory that is now another stream's
        self._free = deque(slots)
        self._last: Passage | None = None

    @property
    def has_room(self) -> bool:
        """Whether buffers are free for another batch."""
        return bool(self._free)

    def check(self, error: Exception) -> None:
        """Ask the device whether it still works after an error; this waits for all of its work.

        After a fault on the device, such as an illegal address, every later call of the process fails as well: the
        error is sticky. After a refused launch none does. The device is asked because no exception class tells the two
        apart: PyTorch raises `torch.AcceleratorError` for both, Triton and cuBLAS a bare RuntimeError.

        Args:
            error: any error but running out of memory.

        Raises:
            DeviceLostError: the device fails again.

        Source: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html, cudaErrorIllegalAddress.
        """
        try:
            self._streams.synchronize()
        except RuntimeError as again:
            raise DeviceLostError(str(self._engine.device), first_line(again)) from error

    @torch.inference_mode()
    def submit(self, payloads: Sequence[bytes | bytearray | memoryview], rows: int, backend: str) -> Passage:
        """Copy a batch in and hand it to the device; this waits for none of it.

        Args:
            payloads: `rows` rows of float32, row-major, in parts; not read any more after the call.
            rows: of the batch, from 1 to `max_rows`.
            backend: as for `Engine.run`.

        Raises:
            InputError: the payloads are not so many rows of the model's width, or more than `max_rows`.
            UnknownBackendError, BackendUnavailableError, OutOfMemoryError: as `Engine.run`.
            RuntimeError: no buffers are free; see `has_room`.
        """
        size = sum(map(len, payloads))
        width = self._engine.config.width_in
        if not 1 <= rows <= self._max_rows or size != rows * width * NUMBER_BYTES:
            raise InputError(
                f"rows: expected 1 to {self._max_rows} rows of {width} float32 numbers, got {size} bytes for {rows}"
            )
        if not self._free:
            raise RuntimeError(f"staging: expected at most {self.depth} batches at a time, got one more")
        slot = self._free.popleft()
        passage = Passage(slot, rows, self._free.append)
        try:
            at = 0
            for payload in payloads:
                slot.bytes_in[at : at + len(payload)] = payload
                at += len(payload)
            self._hand_over(slot, passage, backend)
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # as `Engine.run` does
            try:
                self._streams.synchronize()  # the copy in may be on its way
            finally:
                passage.release()
            raise
        self._last = passage
        return passage

    def _hand_over(self, slot: Slot, passage: Passage, backend: str) -> None:
        engine, rows, enqueue = self._engine, passage.rows, self._streams.enqueue
        host_in, staged = slot.host_in[:rows], slot.device_in[:rows]
        static_input = engine.static_input(backend, rows)
        after: tuple[Event, ...] = ()
        is_idle = self._last is None or self._last.is_computed
        if is_idle and static_input is not None and static_input.dtype == staged.dtype:
            staged = static_input  # nothing computes that the copy would have to wait for, bar what else the engine ran
            after = (enqueue("compute", lambda: None),)
        arrived = enqueue("in", lambda: staged.copy_(host_in, non_blocking=True), after)

        def compute() -> None:
            x = staged if static_input is None or staged is static_input else static_input.copy_(staged)
            result = engine.run(x, backend)
            try:
                passage.outputs = result.float()
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(rows, str(engine.device)) from error

        def fetch() -> None:
            assert passage.outputs is not None  # noqa: S101
            slot.host_out[:rows].copy_(passage.outputs, non_blocking=True)

        passage.computed = enqueue("compute", compute, (arrived,))
        passage.done = enqueue("out", fetch, (passage.computed,))


def staging_for(engine: Engine, max_rows: int) -> Staging | None:
    """Make the staging for an engine's device; None on a CPU, which needs none.

    Raises:
        InputError, BackendError: as `Staging`.
    """
    return Staging(engine, max_rows, CUDAStreams(engine.device)) if engine.device.type == "cuda" else None


def pinned_bytes(rows: int, width: int) -> int:
    """Return what a pinned float32 buffer takes: PyTorch rounds up to a power of two.

    Source: torch/include/ATen/core/CachingHostAllocator.h, allocate.
    """
    return 1 << (rows * width * NUMBER_BYTES - 1).bit_length()
