import pytest

from models.errors import BackendUnavailableError, InputError, MLPError, OutOfMemoryError, UnknownBackendError
from service import errors


def leaves(kind: type[Exception]) -> list[type[Exception]]:
    return [kind] if not kind.__subclasses__() else [leaf for child in kind.__subclasses__() for leaf in leaves(child)]


def test_every_service_error_has_a_code_and_every_code_a_status() -> None:
    codes = {leaf.code for leaf in leaves(errors.ServiceError)}  # type: ignore[attr-defined]
    assert codes | set(errors.MODEL_CODES.values()) == set(errors.STATUS)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InputError("x"), 400, "bad_request"),
        (UnknownBackendError("x", ("eager",)), 400, "bad_request"),
        (BackendUnavailableError("fused", "no compiler", ("eager",)), 503, "backend_unavailable"),
        (OutOfMemoryError(9, "cuda:0"), 503, "backend_unavailable"),
        (errors.RemoteError("deadline_exceeded", "late"), 504, "deadline_exceeded"),
        (errors.RemoteError("made-up", "x"), 500, "internal"),
        (RuntimeError("/srv/secret.py line 3"), 500, "internal"),
        (MLPError("x"), 500, "internal"),
    ],
    ids=repr,
)
def test_every_exception_has_a_status_and_a_code(error: Exception, status: int, code: str) -> None:
    assert (errors.STATUS[errors.code_of(error)], errors.code_of(error)) == (status, code)


def test_a_fault_of_ours_tells_nothing_of_its_inside() -> None:
    assert "secret" not in errors.message_of(RuntimeError("/srv/secret.py line 3"))


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("'/usr/local/bin/g++' does not run: install g++", "'g++' does not run: install g++"),
        (
            "neither in /opt/py/include nor in /srv/.venv/include/: install",
            "neither in include nor in include: install",
        ),
        ("see https://example.org/a/b, and/or 1/2 of it", "see https://example.org/a/b, and/or 1/2 of it"),
        (
            "PermissionError: [Errno 13] Permission denied: '/root'",
            "PermissionError: [Errno 13] Permission denied: 'root'",
        ),
    ],
)
def test_of_a_path_no_more_than_its_last_name_is_told(sentence: str, told: str) -> None:
    assert errors.without_paths(sentence) == told


def test_other_errors_tell_their_sentence() -> None:
    assert errors.message_of(InputError("expected 3 numbers")) == "expected 3 numbers"


def test_whatever_can_be_tried_again_says_when() -> None:
    assert {code for code, status in errors.STATUS.items() if status in (429, 503)} == set(errors.RETRY_AFTER_S)
