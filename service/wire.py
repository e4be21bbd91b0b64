"""Frames between an API process and a worker, over a Unix stream socket.

A frame is a fixed little-endian header and a payload. Times are nanoseconds of CLOCK_MONOTONIC, which all processes of
one host share. Rows travel as float32, row-major, the width being the model's.

    API process -> worker   INFER      rows to compute
                            CANCEL     nobody waits any more for these rows, this shadow or this profile
                            SHADOW     rows to compute when there is nothing else to do
                            PROFILE    UTF-8: where to write the trace of a forward pass
    worker -> API process   HELLO      JSON: device, threads, each backend's state; the first frame, sent when warm
                            RESULT     rows computed
                            ERROR      UTF-8: the code, a line feed, the message
                            CANCELLED  the rows left the queue uncomputed, the shadow or the profile is given up
                            PROFILED   JSON: the operators and kernels of a forward pass
"""

import enum
import struct
from typing import NamedTuple

from service.errors import InternalError

HEADER = struct.Struct("<IBBHIIQQQQ")
MAX_PAYLOAD_BYTES = (1 << 32) - 1


class Kind(enum.IntEnum):
    """What a frame carries."""

    HELLO = 1
    INFER = 2
    RESULT = 3
    ERROR = 4
    CANCEL = 5
    CANCELLED = 6
    PROFILE = 7
    PROFILED = 8
    SHADOW = 9


KINDS = frozenset(Kind)


class Frame(NamedTuple):
    """One message; the fields that a kind does not use are zero.

    Attributes:
        kind: what the payload is.
        request_id: unique within one connection.
        backend: index into the server's list of backends.
        rows: number of rows in the payload; PROFILE: of a pass.
        start_ns: INFER, SHADOW: when the request was accepted. RESULT: see `queue_ns`.
        end_ns: INFER, SHADOW, PROFILE: the deadline. RESULT: see `compute_ns`.
        batch_rows: RESULT: rows of the batch it was computed in.
        batch_ns: RESULT: from when the batch was taken out of the queue until it began to compute. If a request took
            several batches, `batch_rows` is the largest one's, and the times are sums.
        payload: the bytes.
    """

    kind: int
    request_id: int
    payload: bytes | bytearray | memoryview
    backend: int = 0
    rows: int = 0
    start_ns: int = 0
    end_ns: int = 0
    batch_rows: int = 0
    batch_ns: int = 0

    @property
    def queue_ns(self) -> int:
        """RESULT: how long the request waited for its batch; travels in the field `start_ns`."""
        return self.start_ns

    @property
    def compute_ns(self) -> int:
        """RESULT: how long its batch computed; travels in the field `end_ns`."""
        return self.end_ns


def header(
    kind: int,
    request_id: int,
    size: int,
    backend: int = 0,
    rows: int = 0,
    start_ns: int = 0,
    end_ns: int = 0,
    batch_rows: int = 0,
    batch_ns: int = 0,
) -> bytes:
    """Pack the fields of a frame into a header; the payload of `size` bytes is sent after it, uncopied."""
    return HEADER.pack(size, kind, backend, 0, rows, batch_rows, request_id, start_ns, end_ns, batch_ns)


class Decoder:
    """Cuts a byte stream into frames.

    Payloads are views into the received bytes and stay valid after later calls: a buffer whose frames were handed out
    is never written again.
    """

    def __init__(self) -> None:
        self._rest = bytearray()  # the start of a frame that is not whole yet

    @property
    def is_in_frame(self) -> bool:
        """Whether part of a frame has come and the rest has not."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[Frame]:
        """Take received bytes and return every frame that is now whole.

        Raises:
            InternalError: the bytes are not frames of this protocol.
        """
        buffer: bytes | bytearray = data
        if self._rest:
            self._rest += data
            buffer = self._rest
        end = len(buffer)
        if end < HEADER.size or end - HEADER.size < HEADER.unpack_from(buffer)[0]:
            if buffer is data:
                self._rest = bytearray(data)
            return []
        view = memoryview(buffer)
        at = 0
        frames: list[Frame] = []
        while end - at >= HEADER.size:
            size, kind, backend, _, rows, batch_rows, request_id, start_ns, end_ns, batch_ns = HEADER.unpack_from(
                buffer, at
            )
            if kind not in KINDS:
                raise InternalError(f"wire: expected a frame of kind {sorted(KINDS)}, got {kind}")
            start = at + HEADER.size
            if end - start < size:
                break
            payload = view[start : start + size]
            frames.append(Frame(kind, request_id, payload, backend, rows, start_ns, end_ns, batch_rows, batch_ns))
            at = start + size
        self._rest = bytearray(view[at:])
        return frames
