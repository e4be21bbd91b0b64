"""The table of backends, and what runs on a GPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.backends import NAMES, devices, find
from models.backends.compiled import CompiledOnCPU, CompiledOnCUDA
from models.backends.eager import Eager
from models.backends.fused import FusedOnCPU
from models.backends.fused_cuda import FusedOnCUDA
from models.config import ModelConfig
from models.engine import load_engine
from tests.models.test_numerics import faults

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_each_backend_has_a_class_of_its_own_for_each_device() -> None:
    assert NAMES == ("eager", "compiled", "fused")
    assert [find(name, CPU) for name in NAMES] == [Eager, CompiledOnCPU, FusedOnCPU]
    assert [find(name, CUDA) for name in NAMES] == [Eager, CompiledOnCUDA, FusedOnCUDA]
    assert devices("fused") == ("cpu", "cuda")


def test_eager_says_where_a_dtype_is_not_multiplied() -> None:
    reason = Eager.unavailable_reason(CPU, torch.bool)
    assert reason is not None
    assert reason.startswith(f"torch {torch.__version__} does not multiply torch.bool on cpu: ")
    assert "\n" not in reason


def test_fused_asks_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.backends.fused.unavailable", lambda dtype: f"no post-ops in {dtype}")
    assert FusedOnCPU.unavailable_reason(CPU, torch.float32) == "no post-ops in torch.float32"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_backend_runs_on_a_gpu(
    tiny: Callable[..., ModelConfig], write_model: Callable[[ModelConfig], Path], dtype: str
) -> None:
    directory = write_model(tiny(in_features=57, out_features=83, dim=72, hidden=120))
    engine = load_engine(directory, "cuda", dtype, NAMES)
    engine.warm_up(16)
    assert [engine.backends[name].state for name in NAMES] == ["ready", "ready", "ready"]
    assert engine.backends["fused"].note is None  # captured
    rows = dict.fromkeys((1, 3, 16, 17, 40), 1)  # past the largest bucket, in parts
    for name in ("compiled", "fused"):
        assert faults(engine, name, rows) == []
