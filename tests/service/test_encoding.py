import contextlib
import gzip
import random
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.encoding import MAX_MEMBERS, PIECE_BYTES, decoded
from service.errors import BadRequestError, TooLargeError, UnsupportedMediaTypeError


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "deflate without a frame": bare_deflate,
}


@pytest.mark.parametrize("way", PACKERS)
@given(data=st.binary(max_size=2000))
def test_a_packed_body_comes_out_as_it_was(way: str, data: bytes) -> None:
    assert decoded(PACKERS[way](data), way.split()[0].encode(), 2000) == data


@pytest.mark.parametrize("encoding", [b"", b"identity", b" Identity "])
def test_a_plain_body_is_left_alone(encoding: bytes) -> None:
    assert decoded(b"abc", encoding, 2) == b"abc"


@pytest.mark.parametrize("way", PACKERS)
def test_what_unpacks_beyond_the_bound_is_refused_before_it_is_unpacked(way: str) -> None:
    bomb = PACKERS[way](bytes(50 << 20))
    with pytest.raises(TooLargeError, match="at most 1000 bytes, got more once it was unpacked"):
        decoded(bomb, way.split()[0].encode(), 1000)


@pytest.mark.parametrize("way", PACKERS)
@given(data=st.binary(min_size=1, max_size=200), cut=st.integers(1, 8))
def test_a_body_that_is_cut_off_is_refused(way: str, data: bytes, cut: int) -> None:
    packed = PACKERS[way](data)
    with pytest.raises(BadRequestError, match=r"cut off|is not"):
        decoded(packed[: len(packed) - cut], way.split()[0].encode(), 2000)


@given(data=st.binary(max_size=300), encoding=st.sampled_from([b"gzip", b"deflate", b"x-gzip"]))
def test_any_bytes_are_unpacked_or_refused(data: bytes, encoding: bytes) -> None:
    with contextlib.suppress(BadRequestError, TooLargeError):
        assert len(decoded(data, encoding, 1000)) <= 1000


@given(parts=st.lists(st.binary(max_size=200), min_size=1, max_size=10), name=st.sampled_from([b"gzip", b"x-gzip"]))
def test_gzip_data_of_several_members_comes_out_as_one(parts: list[bytes], name: bytes) -> None:
    assert decoded(b"".join(map(gzip.compress, parts)), name, 2000) == b"".join(parts)


def test_members_that_are_longer_than_a_piece_come_out_as_one() -> None:
    first, second = random.Random(0).randbytes(3 * PIECE_BYTES), random.Random(1).randbytes(PIECE_BYTES)
    assert decoded(gzip.compress(first) + gzip.compress(second), b"gzip", 4 * PIECE_BYTES) == first + second


def test_members_that_unpack_beyond_the_bound_together_are_refused() -> None:
    member = gzip.compress(bytes(600))
    with pytest.raises(TooLargeError, match="at most 1000 bytes, got more once it was unpacked"):
        decoded(member + member, b"gzip", 1000)


def test_a_last_member_that_is_cut_off_is_refused() -> None:
    with pytest.raises(BadRequestError, match="cut off"):
        decoded(gzip.compress(b"abc") + gzip.compress(b"def")[:-1], b"gzip", 1000)


def test_more_members_than_anybody_means_are_refused() -> None:
    member = gzip.compress(b"a")
    assert decoded(member * MAX_MEMBERS, b"gzip", MAX_MEMBERS) == b"a" * MAX_MEMBERS
    with pytest.raises(BadRequestError, match="at most 1024 members of gzip, got more; pack it as one"):
        decoded(member * (MAX_MEMBERS + 1), b"gzip", 2 * MAX_MEMBERS)


def test_deflate_data_has_no_members() -> None:
    with pytest.raises(BadRequestError, match="nothing after the body's deflate data, got 11 bytes"):
        decoded(zlib.compress(b"abc") * 2, b"deflate", 1000)


def test_what_follows_the_data_is_refused() -> None:
    with pytest.raises(BadRequestError, match="nothing after the body's gzip data, got 3 bytes"):
        decoded(gzip.compress(b"abc") + b"xyz", b"gzip", 1000)


@pytest.mark.parametrize("encoding", [b"br", b"gzip, gzip", b"compress", b"\xff"])
def test_other_encodings_are_an_unsupported_media_type(encoding: bytes) -> None:
    with pytest.raises(UnsupportedMediaTypeError, match="expected gzip, deflate or none, got"):
        decoded(b"abc", encoding, 1000)
