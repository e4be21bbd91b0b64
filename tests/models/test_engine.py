"""The engine's contract, whatever the backend."""

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import backends as contract
from models.__main__ import main
from models.backends import Backend, row_counts
from models.backends.eager import Eager
from models.config import ModelConfig
from models.engine import SMALL_FLOPS, BackendStatus, Engine, load_engine
from models.errors import (
    BackendError,
    BackendUnavailableError,
    ConfigError,
    InputError,
    OutOfMemoryError,
    UnknownBackendError,
)

Configs = Callable[..., ModelConfig]
Writer = Callable[[ModelConfig], Path]


@pytest.fixture
def directory(tiny: Configs, write_model: Writer) -> Path:
    return write_model(tiny())


@pytest.fixture
def engine(directory: Path) -> Engine:
    return load_engine(directory)


@pytest.fixture(params=["eager", "fused"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_an_engine_says_what_it_is(engine: Engine, tiny: Configs) -> None:
    assert engine.config == tiny()
    assert engine.device == torch.device("cpu")
    assert engine.dtype == torch.float32
    assert engine.parameter_count == tiny().parameter_count
    assert dict(engine.backends) == {"eager": BackendStatus("torch", "cold"), "fused": BackendStatus("onednn", "cold")}


@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (2, 1, 2), (0,), (4, 0), (0, 3)], ids=str)
def test_leading_dimensions_are_kept(engine: Engine, backend: str, leading: tuple[int, ...]) -> None:
    out = engine.run(torch.randn(*leading, 5), backend)
    assert out.shape == (*leading, 3)
    assert out.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_of_any_float_type_are_converted(engine: Engine, backend: str, dtype: torch.dtype) -> None:
    rows = torch.randn(4, 5).to(dtype)
    assert torch.equal(engine.run(rows, backend), engine.run(rows.float(), backend))


def test_rows_may_have_any_strides_and_be_parameters(engine: Engine, backend: str) -> None:
    wide = torch.randn(6, 40)
    plain = engine.run(wide[:, :5].clone(), backend)
    assert torch.equal(engine.run(wide[:, :5], backend), plain)
    assert torch.equal(engine.run(wide.T.contiguous().T[:, :5], backend), plain)
    assert torch.equal(engine.run(torch.nn.Parameter(wide[:, :5].clone()), backend), plain)
    assert torch.equal(engine.run(wide[2:3, :5], backend)[0], engine.run(wide[2, :5], backend))


def test_rows_are_never_written_to(engine: Engine, backend: str) -> None:
    rows = torch.randn(4, 5)
    kept = rows.clone()
    engine.run(rows, backend)
    assert torch.equal(rows, kept)


def test_results_carry_no_gradient_and_are_the_callers_to_keep(engine: Engine, backend: str) -> None:
    first = engine.run(torch.ones(4, 5, requires_grad=True), backend)
    kept = first.clone()
    second = engine.run(torch.zeros(4, 5), backend)
    assert not first.requires_grad
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_passes_through_and_stays_in_its_row(engine: Engine, backend: str, value: float) -> None:
    rows = torch.randn(3, 5)
    clean = engine.run(rows, backend)
    rows[1, 2] = value
    out = engine.run(rows, backend)
    assert not out[1].isfinite().any()
    torch.testing.assert_close(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (torch.zeros(2, 4), r"rows: expected shape \(\.\.\., 5\), got \(2, 4\)"),
        (torch.zeros(5, 2), r"rows: expected shape \(\.\.\., 5\), got \(5, 2\)"),
        (torch.tensor(1.0), r"rows: expected shape \(\.\.\., 5\), got \(\)"),
        (torch.zeros(0, 4), r"got \(0, 4\)"),
        (torch.zeros(2, 5, dtype=torch.int64), r"expected a tensor of floating-point numbers, got torch\.int64"),
        (torch.zeros(2, 5, dtype=torch.bool), r"got torch\.bool"),
        (torch.zeros(2, 5, dtype=torch.complex64), r"got torch\.complex64"),
        ([[0.0] * 5], r"expected a tensor of floating-point numbers, got list"),
    ],
    ids=["width", "transposed", "scalar", "empty", "integer", "bool", "complex", "list"],
)  # fmt: skip
def test_rows_that_do_not_fit_are_refused(engine: Engine, backend: str, rows: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        engine.run(rows, backend)


def test_an_unknown_backend_lists_those_that_were_loaded(engine: Engine) -> None:
    with pytest.raises(UnknownBackendError, match="expected one of eager, fused, got 'compiled'"):
        engine.run(torch.zeros(1, 5), "compiled")


@pytest.mark.parametrize("names", [("eager", "fusd"), ("fusd",)])
def test_an_unknown_backend_is_refused_at_load(directory: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(UnknownBackendError, match="expected one of eager, compiled, fused, got 'fusd'"):
        load_engine(directory, backends=names)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backends": ()}, "backends: expected at least one of eager, compiled, fused"),
        ({"backends": "eager"}, "backends: expected at least one of eager, compiled, fused in a list, got 'eager'"),
        ({"dtype": "float23"}, r"bfloat16, float16, got 'float23' \(did you mean float32\?\)"),
        ({"dtype": torch.float32}, "dtype: expected one of float32, bfloat16, float16, got torch.float32"),
        ({"device": "tpu"}, "device: expected cpu or cuda, got 'tpu'"),
        ({"device": "meta"}, "device: expected cpu or cuda, got 'meta'"),
        ({"device": "cuda:99"}, "device: expected cpu or one of the .* CUDA devices"),
        ({"threads": 0}, "threads: expected a positive integer or None, got 0"),
        ({"threads": True}, "threads: expected a positive integer or None, got True"),
        ({"threads": 10**14}, "threads: expected at most 1,024 or None, got 100,000,000,000,000"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_to_be_had_is_refused_at_load(directory: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        load_engine(directory, **arguments)


def test_a_path_that_is_no_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        load_engine(tmp_path)
    with pytest.raises(ConfigError, match="bundled models"):
        load_engine(os.fspath(tmp_path / "none"))


def test_a_backend_named_twice_is_loaded_once(directory: Path) -> None:
    assert list(load_engine(directory, backends=("fused", "eager", "fused")).backends) == ["fused", "eager"]


def test_a_config_with_a_seed_and_no_weights_runs_the_same_every_time(tiny: Configs, tmp_path: Path) -> None:
    tiny().save(tmp_path)
    rows = torch.randn(3, 5)
    outs = [load_engine(tmp_path).run(rows, "eager") for _ in range(2)]
    assert torch.equal(*outs)
    assert outs[0].abs().max() > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_results_have_the_engines_dtype(directory: Path, dtype: str) -> None:
    engine = load_engine(directory, dtype=dtype)
    for name, status in engine.backends.items():
        if status.state != "unavailable":
            assert engine.run(torch.zeros(2, 5), name).dtype == engine.dtype == getattr(torch, dtype)
    assert engine.backends["eager"].state == "cold"


def test_warm_up_readies_and_reports_every_step(engine: Engine) -> None:
    steps: list[tuple[str, int, int]] = []
    engine.warm_up(4, lambda *step: steps.append(step))
    assert steps == [(name, done, 4) for name in ("eager", "fused") for done in range(5)]
    assert {status.state for status in engine.backends.values()} == {"ready"}


@pytest.mark.parametrize("max_rows", [0, -1, True, 2.0, None])
def test_warm_up_needs_a_positive_row_count(engine: Engine, max_rows: Any) -> None:
    with pytest.raises(InputError, match="max_rows: expected a positive integer"):
        engine.warm_up(max_rows)


def test_warm_up_meets_every_small_row_count_and_the_largest(tiny: Configs) -> None:
    assert row_counts(tiny(), 6) == [1, 2, 3, 4, 5, 6]
    assert row_counts(tiny(), 1) == [1]
    assert row_counts(tiny(), 1000) == [*range(1, 65), 1000]
    large = tiny(dim=4096, hidden=14336, depth=32, in_features=None, out_features=None)
    assert row_counts(large, 512) == [1, 512]


class Broken(Eager):
    """A backend that fails where it is told to."""

    fails_at = "nowhere"

    def warm_up(self, max_rows: int, progress: Callable[[int, int], None]) -> None:
        if self.fails_at == "warm-up":
            raise RuntimeError("the kernel\nTraceback (most recent call last):\n  File ...")
        super().warm_up(max_rows, progress)

    @classmethod
    def unavailable_reason(cls, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        return "the compiler is out" if cls.fails_at == "probe" else None


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a backend that fails in place of `fused`."""

    def install(where: str) -> None:
        monkeypatch.setattr(Broken, "fails_at", where)
        found = contract.find

        def find(name: str, device: torch.device) -> type[Backend] | None:
            return (None if where == "plan" else Broken) if name == "fused" else found(name, device)

        monkeypatch.setattr("models.engine.find", find)

    return install


def test_a_backend_whose_warm_up_fails_becomes_unavailable_and_leaves_the_others(
    directory: Path, broken: Callable[[str], None]
) -> None:
    broken("warm-up")
    engine = load_engine(directory, backends=("fused", "eager"))
    assert engine.backends["fused"].state == "cold"
    statuses = engine.backends
    engine.warm_up(2)
    assert dict(statuses) == {
        "fused": BackendStatus(None, "unavailable", "its warm-up failed with RuntimeError: the kernel"),
        "eager": BackendStatus("torch", "ready"),
    }
    with pytest.raises(BackendUnavailableError) as caught:
        engine.run(torch.zeros(1, 5), "fused")
    assert (caught.value.backend, caught.value.available) == ("fused", ("eager",))
    engine.warm_up(2)
    assert engine.run(torch.zeros(1, 5), "eager").shape == (1, 3)


@pytest.mark.parametrize(
    ("where", "reason"),
    [("probe", "the compiler is out"), ("plan", "there is no fused backend for cpu yet, only for cpu, cuda")],
)
def test_a_backend_that_cannot_run_here_says_so_at_load(
    directory: Path, broken: Callable[[str], None], where: str, reason: str
) -> None:
    broken(where)
    engine = load_engine(directory)
    assert engine.backends["fused"] == BackendStatus(None, "unavailable", reason)
    engine.warm_up(1)
    with pytest.raises(BackendUnavailableError, match=f"'fused' is unavailable: {reason}; available: eager"):
        engine.run(torch.zeros(1, 5), "fused")


def test_a_status_cannot_be_changed_from_outside(engine: Engine) -> None:
    with pytest.raises(TypeError):
        engine.backends["eager"] = BackendStatus(None, "ready")  # type: ignore[index]


def test_each_engine_runs_with_its_own_thread_count_and_small_work_with_one(directory: Path) -> None:
    before = torch.get_num_threads()
    try:
        one, two = load_engine(directory, threads=1), load_engine(directory, threads=2)
        assert (one.threads, two.threads) == (1, 2)
        large = SMALL_FLOPS // two.config.flops_per_row + 1
        for engine, rows, threads in ((one, large, 1), (two, large, 2), (one, 1, 1), (two, 1, 1), (two, large, 2)):
            engine.run(torch.zeros(rows, 5), "eager")
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # the compiler's own
def test_compiled_code_keeps_its_thread_count_at_every_size(directory: Path) -> None:
    before = torch.get_num_threads()
    try:
        engine = load_engine(directory, backends=("eager", "compiled"), threads=2)
        for rows in (1, 64, 1):
            engine.run(torch.zeros(rows, 5), "eager")
            engine.run(torch.zeros(rows, 5), "compiled")
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_eager_and_fused_share_one_set_of_weights_and_leave_it_as_it_was(directory: Path) -> None:
    engine = load_engine(directory)
    rows = torch.randn(4, 5)
    before: Tensor = engine.run(rows, "eager")
    engine.warm_up(8)
    engine.run(rows, "fused")
    assert torch.equal(engine.run(rows, "eager"), before)


def test_a_model_too_small_for_post_ops_says_up_to_how_many_rows() -> None:
    small = load_engine("digits", backends=("fused",))
    small.warm_up(4)
    assert (
        small.backends["fused"].note == "up to 20 rows every product is PyTorch's own, too small to repay oneDNN's call"
    )


def test_one_row_is_told_of_as_one(tmp_path: Path) -> None:
    path = tmp_path / "wider"
    assert main(["new", str(path), "--dim", "256", "--hidden", "704", "--depth", "1"]) == 0
    engine = load_engine(path, backends=("fused",))
    engine.warm_up(1)
    assert (engine.backends["fused"].note or "").startswith("for one row every product is PyTorch's own")


def test_loading_tells_how_far_it_is() -> None:
    steps: list[tuple[int, int]] = []
    load_engine("digits", backends=("eager", "fused"), progress=lambda done, total: steps.append((done, total)))
    done = [step for step, _ in steps]
    assert (done, {total for _, total in steps}) == (sorted(done), {done[-1]})
    assert len(set(done)) > 10


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
    ids=["cuda", "cpu"],
)
def test_rows_that_do_not_fit_are_told_from_other_faults(
    directory: Path, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(directory)

    def fail(*_: object) -> Tensor:
        raise error

    monkeypatch.setattr(Eager, "__call__", fail)
    with pytest.raises(OutOfMemoryError, match="cpu has not enough free memory for 3 rows at once"):
        engine.run(torch.zeros(3, 5), "eager")


def test_what_did_not_fit_holds_no_memory_while_it_is_handled(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_engine(directory)
    made: list[weakref.ref[Tensor]] = []

    def fail(*_: object) -> Tensor:
        hidden = torch.zeros(3)
        made.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Eager, "__call__", fail)
    with pytest.raises(OutOfMemoryError) as caught:
        engine.run(torch.zeros(3, 5), "eager")
    assert made[0]() is None
    assert caught.value.rows == 3  # it is held until here, and its traceback with it
