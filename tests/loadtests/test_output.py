import os
from pathlib import Path

import pytest

from loadtests.output import OutputError, require_directory, require_file, sole_writer


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null/x", "/" + "x" * 300])
def test_a_directory_that_cannot_be_had_is_refused_and_not_made(path: str) -> None:
    with pytest.raises(OutputError, match=r"^--out .*: expected a directory that can be written to"):
        require_directory("--out", Path(path))
    assert not os.path.isdir(path)  # noqa: PTH112  a name that is too long raises there


def test_a_file_that_would_replace_something_else_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (Path("/dev/null"), tmp_path, tmp_path / "pipe"):
        with pytest.raises(OutputError, match="expected a file, which is replaced, got something else"):
            require_file("--json", path)
    with pytest.raises(OutputError, match="there is no directory"):
        require_file("--json", tmp_path / "no" / "file")
    (tmp_path / "earlier").touch()
    require_file("--json", tmp_path / "earlier")
    require_file("--json", tmp_path / "new")


def test_a_directory_has_one_writer_at_a_time_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    with (
        sole_writer("--out", out),
        pytest.raises(OutputError, match="another measurement is writing there"),
        sole_writer("--out", out),
    ):
        pass
    with sole_writer("--out", out):
        pass
    assert list(out.iterdir()) == []
