"""Which heads are remembered."""

import pytest

from service.errors import BadRequestError
from service.exchange import REMEMBERED_HEAD_BYTES, REMEMBERED_HEADS, Head, Heads
from service.inference import InferenceOptions, Predict

PREDICT = Predict(InferenceOptions("m", 2, None, 8, 1 << 20, None))
USUAL = Head(PREDICT, {b"host": b"x"}, 2, keep_alive=True, refusal=None)
HEAD = b"POST /predict HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "head"),
    [
        (HEAD, USUAL._replace(refusal=BadRequestError("no"))),
        (b"POST /predict HTTP/1.1\nhost: x\n\nthe body\r\n\r\n", USUAL),
        (b"POST /predict HTTP/1.1\r\nhost: x\r\n folded\r\n\r\n", USUAL),
        (HEAD[:-4] + b"x" * REMEMBERED_HEAD_BYTES + b"\r\n\r\n", USUAL),
    ],
    ids=["refused", "ends elsewhere", "folded", "long"],
)
def test_only_a_head_that_was_let_in_and_ends_for_certain_is_remembered(data: bytes, head: Head) -> None:
    heads = Heads()
    heads.remember(HEAD, USUAL)
    assert heads.get(HEAD) == USUAL
    heads = Heads()
    heads.remember(data, head)
    assert heads.get(data) is None


def test_a_new_head_takes_the_place_of_the_oldest() -> None:
    heads = Heads()
    several = [HEAD.replace(b"x", b"%d" % index) for index in range(REMEMBERED_HEADS + 1)]
    for data in several:
        heads.remember(data, USUAL)
    assert [heads.get(data) is None for data in several] == [True, *[False] * REMEMBERED_HEADS]
