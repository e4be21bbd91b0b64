import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import InternalError
from service.wire import Decoder, Frame, Kind
from tests.service.frames import packed

frames = st.builds(
    Frame,
    kind=st.sampled_from(list(Kind)),
    request_id=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
    backend=st.integers(0, 255),
    rows=st.integers(0, 2**32 - 1),
    start_ns=st.integers(0, 2**63),
    end_ns=st.integers(0, 2**63),
    batch_rows=st.integers(0, 2**32 - 1),
    batch_ns=st.integers(0, 2**63),
)


@given(sent=st.lists(frames, max_size=8), cuts=st.lists(st.integers(1, 400), max_size=40))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(sent: list[Frame], cuts: list[int]) -> None:
    stream = b"".join(map(packed, sent))
    decoder, received, at = Decoder(), [], 0
    for size in [*cuts, len(stream)]:
        received += decoder.feed(stream[at : at + size])
        at += size
    assert [frame._replace(payload=bytes(frame.payload)) for frame in received] == sent


def test_payloads_stay_valid_after_later_bytes_arrive() -> None:
    decoder = Decoder()
    first, second = Frame(Kind.INFER, 1, b"first!"), Frame(Kind.INFER, 2, b"second")
    wire = packed(first) + packed(second)
    (kept,) = decoder.feed(wire[:-6])
    (other,) = decoder.feed(b"second")
    assert (bytes(kept.payload), bytes(other.payload)) == (b"first!", b"second")


def test_bytes_that_are_no_frames_are_refused() -> None:
    with pytest.raises(InternalError, match="expected a frame of kind"):
        Decoder().feed(bytes(64))
