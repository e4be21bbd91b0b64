from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.aot import source
from kernels.aot.cases import KERNELS
from kernels.aot.source import source_hash


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the kernels, whose sources are hashed anew."""
    for path in source.PACKAGE.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(source, "PACKAGE", tmp_path)
    source_hash.cache_clear()
    yield tmp_path
    source_hash.cache_clear()


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel must be one of gated_activation, .*, got 'attention'"):
        source_hash("attention")


def test_a_source_hash_sees_code_and_neither_comments_nor_other_kernels(package: Path) -> None:
    before = {kernel: source_hash(kernel) for kernel in KERNELS}
    norm = package / "norm.py"
    norm.write_text(norm.read_text().replace("/ N + eps", "/ N + 2 * eps") + "# a comment\n")
    linear = package / "linear.py"
    linear.write_text(linear.read_text() + "# a comment\n")
    source_hash.cache_clear()
    source._jitted.cache_clear()
    assert [kernel for kernel in KERNELS if source_hash(kernel) != before[kernel]] == ["norm"]


def test_two_functions_of_one_name_are_refused(package: Path) -> None:
    (package / "other.py").write_text("@triton.jit\ndef _finish(x):\n    return x\n")
    with pytest.raises(ValueError, match=r"other\.py: _finish: expected a name that no other jitted function has"):
        source_hash("norm")
