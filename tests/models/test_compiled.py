"""The compiled backend: compiled once, never again, and right. Numbers are compared in test_numerics.py."""

import os
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from models import weights
from models.backends import compiled
from models.backends.compiled import CompiledOnCPU, CompiledOnCUDA, compiled_once, missing_toolchain
from models.backends.graphs import bucket, buckets
from models.config import ModelConfig
from models.engine import BackendStatus, Engine, load_engine
from models.mlp import MLP

Configs = Callable[..., ModelConfig]

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.fixture(scope="module")
def engine() -> Engine:
    engine = load_engine("digits", backends=("eager", "compiled", "fused"))
    assert engine.backends["compiled"] == BackendStatus("inductor", "cold")
    engine.warm_up(32)
    return engine


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[Any]]:
    """Stand in for Inductor: note the inputs that a graph was traced for, and run it as it is."""
    from torch._inductor import compile_fx

    seen: list[Sequence[Any]] = []

    def note(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        seen.append(inputs)
        return graph.forward

    monkeypatch.setattr(compile_fx, "compile_fx", note)
    return seen


def model_of(config: ModelConfig) -> MLP:
    model = MLP(config)
    model.load_state_dict(weights.seeded(config))
    return model.requires_grad_(False)


@pytest.mark.slow
def test_the_warm_up_readies_it(engine: Engine) -> None:
    assert engine.backends["compiled"] == BackendStatus("inductor", "ready")


@pytest.mark.slow
def test_no_row_count_compiles_anything_after_the_warm_up(engine: Engine) -> None:
    before = graphs()
    assert before >= 1
    generator = torch.Generator().manual_seed(0)
    for rows in [*torch.randint(1, 33, (64,), generator=generator).tolist(), 33, 100]:
        assert engine.run(torch.randn(rows, 64), "compiled").shape == (rows, 10)
    assert graphs() == before


@pytest.mark.slow
def test_no_property_of_the_callers_rows_compiles_anything(engine: Engine) -> None:
    before = graphs()
    wide = torch.randn(8, 100)
    with torch.inference_mode():
        inferred = torch.randn(8, 64)
    rows = wide[:, :64]
    for given in (
        rows,
        rows[2:3],  # contiguous to PyTorch, with the strides of the wide one
        rows[:0],
        rows[3],
        rows[:, None],
        wide.T.contiguous().T[:, :64],
        rows.double(),
        rows.clone().requires_grad_(),
        torch.nn.Parameter(rows.clone()),
        inferred,
    ):
        torch.testing.assert_close(engine.run(given, "compiled"), engine.run(given, "eager"), rtol=1e-4, atol=1e-4)
    assert graphs() == before


@pytest.mark.slow
def test_engines_do_not_meet(engine: Engine) -> None:
    before = torch.get_num_threads()
    rows = torch.randn(3, 64)
    expected = engine.run(rows, "compiled")
    try:
        other = load_engine("digits", backends=("compiled",), threads=2)
        other.warm_up(1)
        assert other.backends["compiled"].state == "ready"
        compiled_so_far = graphs()
        for _ in range(2):
            torch.testing.assert_close(other.run(rows, "compiled"), expected)
            assert torch.equal(engine.run(rows, "compiled"), expected)
        assert graphs() == compiled_so_far
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_freezing_leaves_the_shared_weights_and_the_setting_alone() -> None:
    engine = load_engine("digits", backends=("eager", "compiled", "fused"))
    rows = torch.randn(3, 64)
    before = {name: engine.run(rows, name) for name in ("eager", "fused")}
    engine.run(rows, "compiled")
    assert all(torch.equal(engine.run(rows, name), before[name]) for name in before)
    assert not torch._inductor.config.freezing


def test_one_graph_serves_every_row_count(tiny: Configs, traced: list[Sequence[Any]]) -> None:
    backend = CompiledOnCPU(model_of(tiny()), tiny())
    with torch.inference_mode():
        for rows in (1, 2, 31):
            x = torch.randn(rows, 5)
            torch.testing.assert_close(backend(x), backend.model(x))
    assert len(traced) == 1
    assert sum(isinstance(value, torch.SymInt) for value in traced[0]) == 1


@pytest.mark.slow
def test_only_the_row_count_is_free_however_many_engines_came_before(
    tiny: Configs, traced: list[Sequence[Any]]
) -> None:
    with torch.inference_mode():
        for width in (4, 6, 9):
            config = tiny(in_features=width)
            CompiledOnCPU(model_of(config), config)(torch.zeros(3, width))
    assert [sum(isinstance(value, torch.SymInt) for value in inputs) for inputs in traced] == [1, 1, 1]


@pytest.mark.slow
def test_a_call_that_does_not_fit_raises_instead_of_compiling(tiny: Configs, traced: list[Sequence[Any]]) -> None:
    run = compiled_once(model_of(tiny()))
    with torch.inference_mode():
        run(torch.zeros(3, 5))
        for rows in range(4, 16):  # past PyTorch's recompilation limit, where it would turn to eager silently
            with pytest.raises(RuntimeError, match="none is compiled anew"):
                run(torch.zeros(rows, 5))
        assert run(torch.zeros(3, 5)).shape == (3, 3)
    assert len(traced) == 1


def test_a_compilation_that_fails_is_the_warm_ups_failure(
    tiny: Configs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor import compile_fx

    def fail(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise OSError("no space left on device")

    monkeypatch.setattr(compile_fx, "compile_fx", fail)
    tiny().save(tmp_path)
    engine = load_engine(tmp_path, backends=("eager", "compiled"))
    engine.warm_up(2)
    assert engine.backends["compiled"] == BackendStatus(
        None, "unavailable", "its warm-up failed with OSError: no space left on device"
    )
    assert engine.backends["eager"].state == "ready"


def test_without_a_compiler_it_is_unavailable_and_says_what_to_install(
    tiny: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/g++")
    tiny().save(tmp_path)
    status = load_engine(tmp_path, backends=("compiled",)).backends["compiled"]
    assert status.state == "unavailable"
    assert status.reason == (
        "Inductor needs a C++ compiler and '/no/such/g++' does not run: install g++, or name one in CXX"
    )


def test_the_compiler_is_looked_for_where_inductor_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_toolchain() is None
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/no/such")
    assert "'g++' does not run" in str(missing_toolchain())
    monkeypatch.setenv("CXX", "/bin/false")
    assert "'/bin/false' does not run" in str(missing_toolchain())


def test_without_pythons_header_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: os.fspath(tmp_path))
    assert f"Inductor needs Python.h, which is neither in {tmp_path} nor in {sys.prefix}" in str(missing_toolchain())
    assert "install Python's development files (python3-dev)" in str(missing_toolchain())


def test_a_header_in_the_virtual_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: "/no/such/python3.11")
    monkeypatch.setattr(sys, "prefix", os.fspath(tmp_path))
    monkeypatch.setenv("CPATH", "/opt/include")
    own = tmp_path / "include/python3.11"
    own.mkdir(parents=True)
    (own / "Python.h").touch()
    for _ in range(2):
        assert missing_toolchain() is None
        assert os.environ["CPATH"] == f"{own}:{tmp_path / 'include'}:/opt/include"


def test_buckets_are_the_powers_of_two_that_hold_every_row_count() -> None:
    assert [bucket(rows) for rows in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    assert [list(buckets(rows)) for rows in (1, 2, 5, 64)] == [[1], [1, 2], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32, 64]]
    assert all(bucket(rows) in buckets(100) for rows in range(1, 101))


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stand in for the capture, which needs a GPU: pad as it does, run the graph itself; note each bucket."""
    sizes: list[int] = []

    def capture(run: Callable[[Tensor], Tensor], held: Tensor) -> Callable[[Tensor], Tensor]:
        sizes.append(held.shape[0])
        held.fill_(float("nan"))  # what a former call left behind must not matter

        def replay(x: Tensor) -> Tensor:
            held[: x.shape[0]] = x
            return run(held)[: x.shape[0]]

        return replay

    monkeypatch.setattr(compiled, "captured", capture)
    return sizes


@pytest.mark.slow
def test_the_plan_for_gpus_pads_to_buckets_and_compiles_each_once(
    tiny: Configs, traced: list[Sequence[Any]], uncaptured: list[int]
) -> None:
    backend = CompiledOnCUDA(model_of(tiny()), tiny())
    steps: list[tuple[int, int]] = []
    with torch.inference_mode():
        backend.warm_up(6, lambda *step: steps.append(step))
        for rows in (*range(1, 9), 9, 16, 21):  # past the largest bucket, in parts
            x = torch.randn(rows, 5)
            torch.testing.assert_close(backend(x), backend.model(x))
    assert uncaptured == [1, 2, 4, 8]
    assert steps == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(traced) == 4
    assert not any(isinstance(value, torch.SymInt) for inputs in traced for value in inputs)


def test_the_plan_for_gpus_readies_a_bucket_for_a_first_call_without_warm_up(
    tiny: Configs, traced: list[Sequence[Any]], uncaptured: list[int]
) -> None:
    backend = CompiledOnCUDA(model_of(tiny()), tiny())
    with torch.inference_mode():
        assert backend(torch.zeros(3, 5)).shape == (3, 3)
    assert uncaptured == [4]
