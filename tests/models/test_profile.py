"""What `python -m models profile` sees; no test relies on how long anything takes."""

import builtins
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import profile
from models.config import ModelConfig
from models.engine import Engine, load_engine
from models.errors import InputError, UnknownBackendError
from models.mlp import FeedForward, norm
from models.profile import Line, Profile

CPU = torch.device("cpu")

# PyTorch's compiler uses what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.fixture
def bare(tiny: Callable[..., ModelConfig], write_model: Callable[[ModelConfig], Path]) -> Callable[..., Engine]:
    """Load a stack of blocks without norm, stem, head and bias; wide enough for oneDNN to be worth its call."""

    def load(backends: tuple[str, ...] = ("eager", "fused"), depth: int = 1) -> Engine:
        widths = {"in_features": None, "out_features": None, "dim": 256, "hidden": 768, "depth": depth}
        return load_engine(write_model(tiny(kind="none", bias=False, **widths)), backends=backends)

    return load


def counts(lines: tuple[Line, ...]) -> dict[str, float]:
    assert {line.level for line in lines} == {"operator"}
    return {line.name: line.count for line in lines}


def test_the_bare_geglu_mlp_is_five_operators_in_eager(tiny: Callable[..., ModelConfig]) -> None:
    ffn = FeedForward(tiny(bias=False)).requires_grad_(False)
    lines = profile.profiled(lambda: ffn(torch.ones(3, 16)), CPU, 4)
    found = counts(lines)
    assert found.pop("aten::ones") == 1
    assert found == {"aten::linear": 3, "aten::gelu": 1, "aten::mul": 1}


def test_a_bare_geglu_block_is_six_operators_in_eager_and_three_fused(bare: Callable[..., Engine]) -> None:
    engine = bare()
    eager, fused = (profile.profile(engine, 5, name) for name in ("eager", "fused"))
    assert counts(eager.lines) == {"aten::linear": 3, "aten::gelu": 1, "aten::mul": 1, "aten::add": 1}  # the residual
    assert counts(fused.lines) == {"mkldnn::_linear_pointwise": 3}  # with the residual
    assert (eager.count("operator"), fused.count("operator")) == (6, 3)
    assert (eager.implementation, fused.implementation, fused.rows) == ("torch", "onednn", 5)


@pytest.mark.slow
def test_what_inductor_fuses_is_seen(bare: Callable[..., Engine]) -> None:
    engine = bare(("compiled",))
    with torch._inductor.config.patch({"cpp.enable_kernel_profile": True}):
        engine.warm_up(1)
    found = counts(profile.profile(engine, 5, "compiled").lines)
    assert sum(count for name, count in found.items() if name == "mkldnn::_linear_pointwise") == 3
    assert any("cpp_fused" in name for name in found)


def test_counts_are_of_one_pass_and_times_of_all_its_operators(bare: Callable[..., Engine]) -> None:
    lines = profile.profile(bare(depth=3), 2, "eager").lines
    assert counts(lines)["aten::linear"] == 9
    assert all(line.time_us > 0 for line in lines)
    assert [line.time_us for line in lines] == sorted((line.time_us for line in lines), reverse=True)


def test_bytes_are_the_operands_and_the_result(bare: Callable[..., Engine]) -> None:
    lines = {line.name: line.bytes for line in profile.profile(bare(), 5, "eager").lines}
    N, D, H = 5, 256, 768
    assert lines["aten::linear"] == 4 * (2 * (N * D + D * H + N * H) + (N * H + H * D + N * D))
    assert lines["aten::gelu"] == 4 * 2 * N * H
    assert lines["aten::mul"] == 4 * 3 * N * H
    assert lines["aten::add"] == 4 * 3 * N * D


def test_fewer_rows_than_one_are_refused(bare: Callable[..., Engine]) -> None:
    with pytest.raises(InputError, match="rows: expected a positive integer, got 0"):
        profile.profile(bare(), 0, "eager")


def test_a_backend_that_is_not_loaded_is_refused(bare: Callable[..., Engine]) -> None:
    with pytest.raises(UnknownBackendError):
        profile.profile(bare(), 1, "compiled")


def test_an_operator_without_shapes_has_no_bytes() -> None:
    found = Profile("compiled", "inductor", 7, (Line("operator", "graph_0_cpp_fused_mul_1", 4, 3.5, None),))
    assert found.to_dict() == {
        "backend": "compiled",
        "implementation": "inductor",
        "rows": 7,
        "operators": 4,
        "kernels": 0,
        "lines": [{"level": "operator", "name": "graph_0_cpp_fused_mul_1", "count": 4, "time_us": 3.5, "bytes": None}],
    }
    heading, _, line, *_ = profile.table(found).splitlines()
    assert heading == "compiled (inductor), 7 rows: 4 operators"
    assert line.split() == ["operator", "4", "3.5", "-", "-", "graph_0_cpp_fused_mul_1"]


def closing(unprofiled_us: float | None, *lines: Line) -> list[str]:
    found = Profile("eager", "torch", 1, lines, unprofiled_us)
    return [line.strip() for line in profile.table(found).splitlines()[2 + len(lines) :]]


def test_a_table_ends_with_the_share_of_the_products_and_both_times_of_a_pass() -> None:
    lines = Line("operator", "aten::linear", 3, 80.0, 4), Line("operator", "graph_0_cpp_fused_linear_1", 1, 20.0, None)
    share = "products 80%, the rest 20%: without it at most 1.25 times as fast, but for faster products"
    near = "a pass: 100.0 us profiled (mean of 10), 60.0 us unprofiled (median of 10)"
    assert closing(60.0, *lines) == [share, near]
    assert closing(None, *lines) == [share, "a pass: 100.0 us profiled"]
    assert closing(40.0, *lines)[2].startswith("the two differ 2.5 times: profiling slows it")
    assert closing(300.0, *lines)[2].startswith("the two differ 3.0 times: much of a pass is in no line")
    assert closing(5.0) == []


def test_where_a_gpu_ran_its_kernels_make_the_share() -> None:
    launch, gemm = Line("operator", "aten::linear", 1, 50.0, 4), Line("kernel", "nvjet_tst_128x64", 1, 30.0, None)
    act = Line("kernel", "gated_activation_kernel", 1, 10.0, None)
    assert closing(40.0, launch, gemm, act)[0].startswith("products 75%, the rest 25%")


def test_each_of_several_backends_has_a_trace_of_its_own() -> None:
    assert profile.trace_path(Path("a/t.json"), "fused", 1) == Path("a/t.json")
    assert profile.trace_path(Path("a/t.json"), "fused", 2) == Path("a/t-fused.json")


def test_a_chart_without_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return genuine(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    found = Profile("eager", "torch", 1, (Line("operator", "aten::add", 1, 1.0, 4),))
    with pytest.raises(InputError, match=r"png: expected matplotlib .* pip install -r requirements/dev.txt"):
        profile.chart([found], tmp_path / "p.png")


def test_a_norm_is_one_operator(tiny: Callable[..., ModelConfig]) -> None:
    module = norm(tiny().norm, 16).requires_grad_(False)
    x = torch.ones(3, 16)
    assert counts(profile.profiled(lambda: module(x), CPU, 4)) == {"aten::rms_norm": 1}
