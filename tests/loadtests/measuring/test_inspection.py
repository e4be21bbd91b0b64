import threading

import pytest

from loadtests.generator.target import Target, TargetError, address
from loadtests.measuring.expected import expected_rows
from loadtests.measuring.inspection import Served, inspect
from tests.loadtests.faulty_server import Fault, document, faulty_server, no_fault, reply

KEYLESS = "401 unauthorized: key; set MLP_API_KEY to the server's key, or give it with --key"
READY, MODEL, METADATA, BACKENDS = "/v2/health/ready", "/model", "/v2/models/m", "/backend"


def inspected(fault: Fault, rows: int = 1, dtype: str = "float32") -> tuple[Target, dict[str, str], Served]:
    with faulty_server(fault) as server:
        host, port = address(server.url)
        return inspect(host, port, None, "json", 0, "", rows, dtype)


def always(path: str, sent: bytes | None) -> Fault:
    return lambda asked, _, right: sent if asked == path else right


def test_a_server_is_told_by_what_it_says() -> None:
    target, ready, served = inspected(no_fault)
    assert (target.model, target.width_in, target.width_out) == ("m", 4, 4)
    assert ready == {"eager": "torch", "fused": "torch"}
    assert served == Served("m", "float32", most_rows=64, device=None)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (always(READY, b"garbage\r\n\r\n"), "expected a server, got no reply: expected an HTTP reply"),
        (always(READY, None), "expected a server, got no reply: the server closed the connection"),
        (always(READY, document({"x": 1}, "503 Busy")), "expected a server that is ready, got 503"),
        (always(MODEL, document({"error": "key", "code": "unauthorized"}, "401 No")), KEYLESS),
        (always(MODEL, reply(b"no", status="401 No")), "401 b'no'; set MLP_API_KEY"),
        (always(MODEL, reply(b"[" * 100_000)), "/model: expected JSON, got"),
        (always(MODEL, document([1])), "/model: expected this project's server, got"),
        (always(METADATA, document({"inputs": [], "outputs": None})), "expected this project's server, got other"),
        (always(METADATA, document({"inputs": [{"shape": [-1]}], "outputs": [{"shape": [10**12]}]})), "rows of 1 to"),
        (always(BACKENDS, document([])), "expected this project's server, got other metadata"),
    ],
    ids=["garbage", "closed", "not ready", "key", "no error", "deep", "list", "no tensors", "widths", "no backends"],
)
def test_a_server_that_says_something_else_is_refused_in_a_sentence(fault: Fault, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        inspected(fault)
    assert message in str(caught.value)
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]  # the server has ended


def test_more_rows_than_it_takes_and_another_dtype_are_refused_before_any_request() -> None:
    with pytest.raises(TargetError, match="--rows 65: the server takes at most 64 rows a request"):
        inspected(no_fault, rows=65)
    with pytest.raises(TargetError, match="--dtype bfloat16: the server computes in float32"):
        inspected(no_fault, dtype="bfloat16")


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (lambda right: right[:-4] + b"\x00\x00\xc0\x7f", "expected finite outputs, got NaN or infinity"),
        (lambda right: right.replace(b"content-length: ", b"content-length: 1"), "no reply: timed out"),
        (lambda _: None, "no reply: the server closed the connection"),
    ],
    ids=["NaN", "half", "none"],
)
def test_expected_rows_that_nothing_can_be_compared_with_are_refused(
    monkeypatch: pytest.MonkeyPatch, sent: object, message: str
) -> None:
    monkeypatch.setattr("loadtests.generator.target.ANSWER_LIMIT_S", 0.2)
    with faulty_server(lambda path, _, right: sent(right) if "infer" in path else right) as server:  # type: ignore[operator]
        host, port = address(server.url)
        target, *_ = inspect(host, port, None, "json", 0, "", 1, "float32")
        with pytest.raises(TargetError, match=f"the expected rows, from backend eager.*{message}"):
            expected_rows(target, "float32")
