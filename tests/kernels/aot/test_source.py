from pathlib import Path

import pytest

from kernels.aot import source
from kernels.aot.cases import KERNELS
from kernels.aot.source import source_hash


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernel must be one of gated_activation, .*, got 'attention'"):
        source_hash("attention")


def test_a_source_hash_sees_code_and_neither_comments_nor_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in source.PACKAGE.glob("*.py"):
        (tmp_path / path.name).write_text(path.read_text())
    before = {kernel: source_hash(kernel) for kernel in KERNELS}
    norm = tmp_path / "norm.py"
    norm.write_text(norm.read_text().replace("/ N + eps", "/ N + 2 * eps") + "# a comment\n")
    linear = tmp_path / "linear.py"
    linear.write_text(linear.read_text() + "# a comment\n")
    monkeypatch.setattr(source, "PACKAGE", tmp_path)
    source_hash.cache_clear()
    try:
        changed = [kernel for kernel in KERNELS if source_hash(kernel) != before[kernel]]
    finally:
        source_hash.cache_clear()
    assert changed == ["norm"]
