import json
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter

from kernels import bench as module
from kernels.__main__ import main
from kernels.bench import HINTS
from kernels.numerics import disagreement
from kernels.onednn import unavailable
from kernels.roof import Roof

CONTESTS = 7  # of one shape, on a GPU

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's ways are measured where there is no GPU")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    roof = Roof(1e10, dict.fromkeys(module.CPU_DTYPES, 1e11))
    monkeypatch.setattr(module, "measured_roof", lambda *_: roof)
    monkeypatch.setattr(module, "cache_flush", lambda _: lambda: None)


@pytest.mark.slow
def test_every_way_is_measured_cold_and_warm(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    flags = ["--rows", "1,3", "--widths", "64x192", "--repetitions", "2"]
    assert main(["bench", "--device", "cpu", *flags, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    dtypes = [each for each in module.CPU_DTYPES if unavailable(each) is None]
    ways = ["plain", *(f"packed for {hint}" for hint in HINTS)]
    contests = len(dtypes) * 2 * 2  # of two row counts, cold and warm
    assert len(document["rows"]) == contests * (3 * len(ways) + 2)
    assert {row["way"] for row in document["rows"] if row["op"] == "rms_norm"} == {"plain", "fewer passes"}
    assert [row["way"] for row in document["rows"][: len(ways)]] == ways
    for row in document["rows"]:
        assert 0 < row["low_us"] <= row["median_us"] <= row["high_us"]
        assert row["roof_percent"] > 0
    assert {"device", "threads", "torch", "commit", "load_average"} <= set(document["conditions"])
    assert document["roof"]["copy_gb_per_s"] == 10
    printed = capsys.readouterr().out
    assert "linear gelu_tanh, packed for 64, float32, 3x64x192, cold" in printed
    assert "Liger's MLP: not measured: it is for GPUs" in printed
    assert document["liger"] == module.liger_state(torch.device("cpu"))


class StandIn(torch.nn.Module):
    """Takes what Liger's modules take, by the same names; they themselves run on a GPU alone."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.act = config.hidden_act
        dim, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (torch.nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x)
        act = F.silu(gate) if self.act == "silu" else F.gelu(gate, approximate="tanh")
        out: torch.Tensor = self.down_proj(act * self.up_proj(x))
        return out


def test_the_ways_of_one_contest_on_a_gpu_agree_and_ligers_is_among_them_where_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in = ModuleType("liger_kernel.transformers")
    vars(stand_in).update(dict.fromkeys(module.LIGER_ACTIVATIONS, StandIn))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    for version in ("0.8.5", None):
        monkeypatch.setattr(module, "liger_version", lambda version=version: version)
        found = list(module._gpu_contests(torch.float16, 3, 32, 48, torch.device("cpu"), False))
        for contest in found:
            has_liger = version is not None and contest.op.startswith("mlp ")
            assert list(contest.ways) == ["eager", "triton", *["liger"] * has_liger]
            plain = contest.ways["eager"]
            assert isinstance(plain, partial)
            wide = (each.double() if isinstance(each, torch.Tensor) else each for each in plain.args)
            exact = plain.func(*wide, **plain.keywords)
            with torch.no_grad():
                for name, way in contest.ways.items():
                    assert disagreement(cast("torch.Tensor", way()), plain(), exact) is None, (contest.op, name)
        assert [each.op for each in found][:2] == ["mlp gelu_tanh", "mlp silu"]


@pytest.mark.slow
def test_what_is_measured_as_compiled_is_compiled_anew_at_each_of_more_shapes_than_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    for count, rows in enumerate(range(1, torch._dynamo.config.recompile_limit + 2)):
        for done, contest in enumerate(module._gpu_contests(torch.float32, rows, 16, 32, torch.device("cpu"), True), 1):
            assert list(contest.ways) == ["eager", "triton", "compiled"]
            with torch.no_grad():
                torch.testing.assert_close(contest.ways["compiled"](), contest.ways["eager"]())
            assert counter.frame_count == count * CONTESTS + done, (contest.op, rows)
        assert done == CONTESTS
    torch.compiler.reset()


def test_it_is_said_whether_liger_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert module.liger_state(torch.device("cpu")) == "not measured: it is for GPUs"
    monkeypatch.setattr(module, "liger_version", lambda: "0.8.5")
    assert module.liger_state(torch.device("cuda")) == "measured, version 0.8.5"
    monkeypatch.setattr(module, "liger_version", lambda: None)
    assert module.liger_state(torch.device("cuda")) == "not installed: pip install liger-kernel"


def test_the_ways_of_one_contest_agree(small: None) -> None:
    torch.manual_seed(0)
    for contest in module._cpu_contests(torch.float32, 3, 64, 48):
        results = [way() for way in contest.ways.values()]
        for result in results:
            torch.testing.assert_close(result, results[0])
