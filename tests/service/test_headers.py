import pytest

from service.headers import headers_of


@pytest.mark.parametrize(
    ("lines", "headers"),
    [
        ([], {}),
        ([(b"a", b"1"), (b"b", b"2")], {b"a": b"1", b"b": b"2"}),
        ([(b"a", b"1"), (b"b", b"2"), (b"a", b"1"), (b"a", b"3")], {b"a": b"1, 1, 3", b"b": b"2"}),
    ],
    ids=len,
)
def test_the_values_of_a_header_that_comes_several_times_are_joined_in_their_order(
    lines: list[tuple[bytes, bytes]], headers: dict[bytes, bytes]
) -> None:
    assert headers_of(lines) == headers
