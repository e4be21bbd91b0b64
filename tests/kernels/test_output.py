"""Files and directories that cannot be written are told before the work."""

import os
from pathlib import Path

import pytest

from kernels.output import no_directory_reason, no_file_reason, write


def test_what_can_be_written_has_no_reason(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    assert no_file_reason(tmp_path / "new") is None
    assert no_file_reason(tmp_path / "there") is None
    assert no_directory_reason(tmp_path) is None
    assert no_directory_reason(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == [tmp_path / "there"]


def test_what_may_not_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    assert no_file_reason(tmp_path / "x") == f"expected a file that may be written, got {tmp_path}/x, which may not"
    assert (
        no_directory_reason(tmp_path / "x")
        == f"expected a directory that may be written to, got {tmp_path}/x, which may not"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's device that is always full")
def test_a_full_disk_is_told_with_the_file() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        write(Path("/dev/full"), "text")
    assert caught.value.filename == "/dev/full"
