"""Fixtures for the kernels' tests."""

import importlib.util
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

serial = itertools.count()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def far_apart(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """Copy three rows to where the last one's offset passes 2**31; on a CPU the memory in between is never touched."""

    def copy(rows: torch.Tensor) -> torch.Tensor:
        stride = 2**30 + 8
        storage = torch.empty(2 * stride + rows.shape[1], dtype=torch.float16, device=device)
        return storage.as_strided(rows.shape, (stride, 1)).copy_(rows)

    return copy


@pytest.fixture
def mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str, str], ModuleType]:
    """Import a module again with one piece of its source replaced and its operators in a namespace of their own."""

    def make(module: ModuleType, old: str, new: str) -> ModuleType:
        source = Path(str(module.__file__)).read_text()
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        name = f"mutant{next(serial)}"
        source = (
            source.replace(old, new).replace('"mlp::', f'"{name}::').replace("torch.ops.mlp.", f"torch.ops.{name}.")
        )
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        changed = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, changed)
        spec.loader.exec_module(changed)
        return changed

    return make
