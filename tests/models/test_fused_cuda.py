"""The plan for GPUs, its kernels interpreted on the CPU; what a real GPU does is for the tests marked gpu."""

import gc
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from kernels.linear import linear
from kernels.rms_gated_linear import fold_norm
from models import backends
from models.backends import fused_cuda, graphs, paths
from models.backends.fused_cuda import FusedOnCUDA
from models.backends.paths import HiddenPath
from models.config import ModelConfig
from models.engine import Engine, load_engine
from tests.models.test_numerics import absent, faults, form

pytestmark = pytest.mark.slow  # interpreted

Configs = Callable[..., ModelConfig]
Writer = Callable[[ModelConfig], Path]
Load = Callable[..., Engine]

DRAWS = {3: 1, 17: 1}  # interpreted, each run is slow
WIDTHS = {"in_features": 19, "out_features": 83, "dim": 40, "hidden": 50}
FORMS: list[tuple[str, HiddenPath, dict[str, Any]]] = [
    *(
        (dtype, path, {"activation": "gelu_tanh", "gated": True, "kind": "rms", "position": "pre", "bias": False})
        for dtype in ("float32", "bfloat16", "float16")
        for path in get_args(HiddenPath)
    ),
    ("float32", "split", {"activation": "gelu", "gated": True, "kind": "layer", "position": "pre", "bias": True}),
    ("float32", "dual", {"activation": "gelu", "gated": True, "kind": "layer", "position": "both", "bias": True}),
    ("float32", "library", {"activation": "relu", "gated": True, "kind": "rms", "position": "both", "bias": True}),
    ("bfloat16", "dual", {"activation": "silu", "gated": True, "kind": "rms", "position": "both", "bias": False}),
    ("bfloat16", "dual", {"activation": "silu", "gated": True, "kind": "layer", "position": "post", "bias": True}),
    ("float32", "dual", {"activation": "gelu", "gated": False, "kind": "layer", "position": "post", "bias": True}),
    ("bfloat16", "dual", {"activation": "gelu_tanh", "gated": False, "kind": "rms", "position": "pre", "bias": True}),
    ("float32", "dual", {"activation": "silu", "gated": False, "kind": "layer", "position": "both", "bias": False}),
    ("float32", "dual", {"activation": "relu", "gated": True, "kind": "none", "position": "pre", "bias": False}),
    ("float32", "dual", {"activation": "gelu", "gated": True, "kind": "none", "position": "both", "bias": True}),
]


@pytest.fixture
def load(tiny: Configs, write_model: Writer, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a model with the plan for GPUs in place of the CPU's."""
    if torch.cuda.is_available():
        pytest.skip("kernels are interpreted only where there is no GPU")
    monkeypatch.setitem(backends._PLANS["fused"], "cpu", "models.backends.fused_cuda:FusedOnCUDA")
    monkeypatch.setattr(FusedOnCUDA, "unavailable_reason", lambda *_: None)

    def make(dtype: str = "float32", path: HiddenPath = "dual", is_folded: bool = False, **changes: Any) -> Engine:
        monkeypatch.setattr(fused_cuda, "choose", lambda *_: path)
        monkeypatch.setattr(fused_cuda, "is_norm_folded", lambda *_: is_folded)
        return load_engine(write_model(tiny(**{**WIDTHS, **changes})), dtype=dtype)

    return make


def plan_of(engine: Engine) -> FusedOnCUDA:
    plan = engine._backends["fused"]
    assert isinstance(plan, FusedOnCUDA)
    return plan


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note every operator that the plan calls."""
    noted: list[str] = []
    names = (
        *("linear", "gated_linear", "rms_gated_linear", "gated_activation"),
        *("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"),
    )

    def noting(name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            noted.append(name)
            return op(*arguments, **options)

        return call

    for name in names:
        monkeypatch.setattr(fused_cuda, name, noting(name, getattr(fused_cuda, name)))
    return noted


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "path", "choices"), FORMS, ids=lambda it: form(it) or str(it))
def test_the_plan_is_as_exact_as_eager(load: Load, dtype: str, path: HiddenPath, choices: dict[str, Any]) -> None:
    assert faults(load(dtype, path, **choices), "fused", DRAWS) == []


@pytest.mark.parametrize("path", get_args(HiddenPath))
def test_one_row_is_as_exact_as_eager(load: Load, path: HiddenPath) -> None:
    assert faults(load(path=path), "fused", {1: 3}) == []


@pytest.mark.parametrize(("dtype", "bias"), [("float32", True), ("float16", False), ("bfloat16", True)])
def test_with_norms_folded_it_is_as_exact_as_eager(load: Load, dtype: str, bias: bool) -> None:
    engine = load(dtype, is_folded=True, bias=bias, activation="silu" if bias else "gelu_tanh")
    generator = torch.Generator().manual_seed(5)
    for block in plan_of(engine)._blocks:
        assert block.pre_norm is not None
        weight = block.pre_norm.module.weight  # eager's too
        weight.copy_(1 + torch.randn(weight.shape, generator=generator) / 3)
    assert faults(engine, "fused", DRAWS) == []


def test_each_choice_occurs_among_the_forms() -> None:
    assert absent(choices for _, _, choices in FORMS) == set()


def erf_for_tanh(plan: FusedOnCUDA) -> None:
    for block in plan._blocks:
        block.hidden.activation = "gelu"


def gate_and_up_swapped(plan: FusedOnCUDA) -> None:
    for block in plan._blocks:
        assert block.hidden.gate is not None
        block.hidden.gate, block.hidden.up = block.hidden.up, block.hidden.gate


def norm_dropped(plan: FusedOnCUDA) -> None:
    plan._blocks[-1].pre_norm = None


def block_dropped(plan: FusedOnCUDA) -> None:
    plan._blocks.pop()


@pytest.mark.parametrize(
    "mutate", [erf_for_tanh, gate_and_up_swapped, norm_dropped, block_dropped], ids=lambda it: it.__name__
)
def test_the_rule_sees_a_mistake(load: Load, mutate: Callable[[FusedOnCUDA], None]) -> None:
    engine = load()
    mutate(plan_of(engine))
    assert len(faults(engine, "fused", DRAWS)) == len(DRAWS)


def test_the_rule_sees_a_dropped_residual(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*arguments: Any, **_: Any) -> Any:
        return linear(*arguments)

    engine = load()
    monkeypatch.setattr(fused_cuda, "linear", without)
    assert len(faults(engine, "fused", DRAWS)) == len(DRAWS)


@pytest.mark.parametrize(
    ("path", "changes", "expected"),
    [
        ("dual", {}, ["rms_norm", "gated_linear", "linear"] * 2),
        ("library", {}, ["rms_norm", "gated_activation", "linear"] * 2),
        ("split", {}, ["rms_norm", "linear", "gated_activation", "linear"] * 2),
        ("dual", {"gated": False, "kind": "layer"}, ["layer_norm", "linear", "linear"] * 2),
        ("dual", {"position": "post"}, ["gated_linear", "linear", "rms_norm"] * 2),
        (
            "dual",
            {"position": "both", "kind": "layer"},
            [
                *("layer_norm", "gated_linear", "linear", "layer_norm"),
                *("add_layer_norm", "gated_linear", "linear", "layer_norm"),
            ],
        ),
        ("dual", {"kind": "none"}, ["gated_linear", "linear"] * 2),
    ],
)
def test_a_block_takes_the_kernels_that_the_module_names(
    load: Load, launches: list[str], path: HiddenPath, changes: dict[str, Any], expected: list[str]
) -> None:
    engine = load("float32", path, **{"in_features": None, "out_features": None, **changes})
    engine.run(torch.zeros(2, 40), "fused")
    assert launches == expected


@pytest.mark.parametrize(
    ("path", "changes", "expected"),
    [
        ("dual", {}, ["rms_gated_linear", "linear"] * 2),
        ("library", {}, ["rms_norm", "gated_activation", "linear"] * 2),  # the norm was compared with the dual product
        ("dual", {"kind": "layer"}, ["layer_norm", "gated_linear", "linear"] * 2),
        ("dual", {"gated": False}, ["rms_norm", "linear", "linear"] * 2),
        ("dual", {"position": "post"}, ["gated_linear", "linear", "rms_norm"] * 2),
        (
            "dual",
            {"position": "both"},
            ["rms_norm", "gated_linear", "linear", "rms_norm", "add_rms_norm", "gated_linear", "linear", "rms_norm"],
        ),
    ],
)
def test_where_the_table_says_folded_a_gated_block_behind_an_rms_norm_takes_two_kernels(
    load: Load, launches: list[str], path: HiddenPath, changes: dict[str, Any], expected: list[str]
) -> None:
    engine = load("float32", path, is_folded=True, **{"in_features": None, "out_features": None, **changes})
    for _ in range(2):
        engine.run(torch.zeros(2, 40), "fused")
    assert launches == expected * 2
    assert engine.backends["fused"].note is None


def test_each_bucket_is_folded_as_the_table_says(
    load: Load, launches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def from_the_third_row_on(*shape: Any) -> bool:
        asked.append(shape)
        return bool(shape[2] > 2)

    engine = load("float16", in_features=None, out_features=None, depth=1)
    monkeypatch.setattr(fused_cuda, "is_norm_folded", from_the_third_row_on)
    engine.run(torch.zeros(2, 40), "fused")
    engine.run(torch.zeros(1, 40), "fused")
    engine.warm_up(3)
    launches.clear()
    for rows in (2, 3):
        engine.run(torch.zeros(rows, 40), "fused")
    assert launches == ["rms_norm", "gated_linear", "linear", "rms_gated_linear", "linear"]
    assert asked == [(None, torch.float16, rows, 40, 50) for rows in (2, 1, 4)]


def test_a_norms_weight_is_folded_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[Tensor] = []

    def noting(weight: Tensor, norm_weight: Tensor) -> Tensor:
        folded.append(weight)
        return fold_norm(weight, norm_weight)

    monkeypatch.setattr(fused_cuda, "fold_norm", noting)
    engine = load(is_folded=True)
    for rows in (1, 2, 1):
        engine.run(torch.zeros(rows, 19), "fused")
    assert len(folded) == 2 * 2  # gate and up of two blocks


def test_a_norm_that_the_dtype_cannot_fold_stays_apart_and_the_status_says_so(load: Load, launches: list[str]) -> None:
    engine = load("float16", is_folded=True, in_features=None, out_features=None)
    norm = plan_of(engine)._blocks[1].pre_norm
    assert norm is not None
    norm.module.weight.fill_(2.0**-20)
    assert faults(engine, "fused", {3: 4}) == []
    assert set(launches) == {"rms_gated_linear", "rms_norm", "gated_linear", "linear"}
    assert engine.backends["fused"].note == (
        "a norm of its own in 1 of 2 blocks: fold_norm: 50 of 50 rows times the norm's weight are beyond what "
        "torch.float16 holds precisely"
    )


def test_a_wide_norm_is_pytorchs(load: Load, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_cuda, "WIDEST", 39)
    engine = load(position="both")
    assert faults(engine, "fused", {3: 4}) == []
    assert not {"rms_norm", "add_rms_norm"} & set(launches)


def test_no_result_is_an_operand(load: Load) -> None:
    engine = load(in_features=None, out_features=None)
    rows = torch.randn(3, 40)
    kept = rows.clone()
    first = engine.run(rows, "fused")
    again = first.clone()
    engine.run(rows + 1, "fused")
    assert torch.equal(rows, kept)
    assert torch.equal(first, again)


def test_warm_up_readies_each_bucket_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    runner = FusedOnCUDA.runner

    def noting(plan: FusedOnCUDA, size: int) -> Callable[[Tensor], Tensor]:
        sizes.append(size)
        return runner(plan, size)

    monkeypatch.setattr(FusedOnCUDA, "runner", noting)
    engine = load()
    engine.warm_up(5)
    rows = torch.randn(13, 19)
    result = engine.run(rows, "fused")  # past the largest bucket, in parts
    assert sizes == [1, 2, 4, 8]
    torch.testing.assert_close(result, engine.run(rows, "eager"), rtol=1e-4, atol=1e-4)
    assert engine.backends["fused"].implementation == "triton"


@pytest.fixture
def on_a_gpu(load: Load, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine whose plan takes its device for a GPU; what it captures with is for the test to replace."""
    engine = load()
    plan_of(engine).device = torch.device("cuda")
    monkeypatch.setattr(FusedOnCUDA, "path", lambda *_: "dual")
    monkeypatch.setattr(FusedOnCUDA, "is_folded", lambda *_: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    return engine


def test_all_buckets_share_one_pool(on_a_gpu: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def capture(run: Callable[[Tensor], Tensor], held: Tensor, pool: Any) -> Callable[[Tensor], Tensor]:
        seen.append((held.shape[0], pool))
        return run

    monkeypatch.setattr(fused_cuda, "captured", capture)
    on_a_gpu.warm_up(3)
    assert seen == [(1, (0, 7)), (2, (0, 7)), (4, (0, 7))]
    assert on_a_gpu.backends["fused"].note is None


def test_where_capture_fails_the_launches_are_plain_and_the_status_says_why(
    on_a_gpu: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(run: Any, held: Tensor, pool: Any) -> Any:
        if held.shape[0] > 1:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return run

    monkeypatch.setattr(fused_cuda, "captured", capture)
    on_a_gpu.warm_up(1)
    assert on_a_gpu.backends["fused"].note is None
    on_a_gpu.warm_up(4)
    status = on_a_gpu.backends["fused"]
    assert (status.state, status.reason) == ("ready", None)
    assert status.note == (
        "plain launches in place of a CUDA graph for up to 2, 4 rows, whose capture failed with RuntimeError: "
        "operation not permitted"
    )
    assert faults(on_a_gpu, "fused", {3: 4}) == []


@pytest.mark.parametrize(
    ("message", "told"), [("no graphs today", "RuntimeError: no graphs today"), ("", "RuntimeError")]
)
def test_a_run_that_meets_a_failing_capture_says_so_in_the_status(
    message: str, told: str, on_a_gpu: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(run: Any, held: Tensor, pool: Any) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr(fused_cuda, "captured", capture)
    on_a_gpu.run(torch.zeros(2, 19), "fused")
    status = on_a_gpu.backends["fused"]
    assert status.state == "cold"
    assert str(status.note).endswith(f"whose capture failed with {told}")
    assert plan_of(on_a_gpu).note is plan_of(on_a_gpu).note  # written when a bucket is readied, not on each run


def test_a_kernel_that_fails_is_no_matter_of_capturing(on_a_gpu: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the kernel")

    monkeypatch.setattr(fused_cuda, "gated_linear", fail)
    on_a_gpu.warm_up(1)
    assert on_a_gpu.backends["fused"].reason == "its warm-up failed with RuntimeError: the kernel"


def test_a_dtype_that_the_kernels_do_not_take_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    assert FusedOnCUDA.unavailable_reason(torch.device("cuda"), torch.bfloat16) is None
    reason = FusedOnCUDA.unavailable_reason(torch.device("cuda"), torch.float64)
    assert reason == "the kernels take float32, float16 or bfloat16, not torch.float64"


def test_without_triton_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    reason = FusedOnCUDA.unavailable_reason(torch.device("cuda"), torch.bfloat16)
    assert reason == "the kernels need Triton, and none is found that works on cuda"


def test_no_garbage_is_collected_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    was_enabled: list[bool] = []
    modes: list[str] = []

    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    @contextmanager
    def here(*_: Any, capture_error_mode: str | None = None) -> Any:
        modes.extend(filter(None, [capture_error_mode]))
        yield

    for name, stand_in in {
        "device": here,
        "stream": here,
        "graph": here,
        "Stream": Stream,
        "current_stream": Stream,
        "CUDAGraph": lambda: SimpleNamespace(replay=None),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def run(x: Tensor) -> Tensor:
        was_enabled.append(gc.isenabled())
        return x

    graphs.captured(run, torch.zeros(1))
    assert was_enabled == [True, True, True, False]
    assert gc.isenabled()
    assert modes == ["thread_local"]


def test_the_default_path_follows_from_the_shapes() -> None:
    half, single = torch.bfloat16, torch.float32
    assert paths.default(half, 768, 3072, 1, 132) == "dual"
    assert paths.default(half, 768, 1024, 64, 132) == "split"  # 32 tiles would leave 100 multiprocessors idle
    assert paths.default(half, 768, 3072, 8192, 132) == "dual"
    assert paths.default(half, 4096, 14336, 8192, 132) == "library"
    assert paths.default(single, 768, 3072, 8192, 132) == "library"


def test_a_measured_path_goes_before_the_default(paths_file: Path) -> None:
    paths_file.write_text('{"Some GPU": {"bfloat16": {"768x3072": {"8": "split"}}}}')
    assert paths.choose("Some GPU", torch.bfloat16, 768, 3072, 8, 132) == "split"
    assert paths.choose("Some GPU", torch.bfloat16, 768, 3072, 16, 132) == "dual"
    assert paths.choose("Other GPU", torch.bfloat16, 768, 3072, 8, 132) == "dual"


def test_a_path_that_there_is_not_is_refused(paths_file: Path) -> None:
    paths_file.write_text('{"Some GPU": {"bfloat16": {"768x3072": {"8": "best"}}}}')
    with pytest.raises(ValueError, match="768x3072, 8 rows: expected one of dual, library, split, got 'best'"):
        paths.choose("Some GPU", torch.bfloat16, 768, 3072, 8, 132)


def test_the_shipped_table_is_sound() -> None:
    paths.table.cache_clear()
    paths.table()
