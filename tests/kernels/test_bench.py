import json
from pathlib import Path

import pytest
import torch

from kernels import bench as module
from kernels.__main__ import main
from kernels.bench import HINTS
from kernels.onednn import unavailable
from kernels.roof import Roof

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's ways are measured where there is no GPU")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    roof = Roof(1e10, dict.fromkeys(module.CPU_DTYPES, 1e11))
    monkeypatch.setattr(module, "measured_roof", lambda *_: roof)
    monkeypatch.setattr(module, "cache_flush", lambda _: lambda: None)
    monkeypatch.setattr(module, "CPU_SHAPES", ((64, 192),))


@pytest.mark.slow
def test_every_way_is_measured_cold_and_warm(small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    assert main(["bench", "--device", "cpu", "--rows", "1,3", "--repetitions", "2", "--json", str(path)]) == 0
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
    assert "linear gelu_tanh, packed for 64, float32, 3x64x192, cold" in capsys.readouterr().out


def test_the_ways_of_one_contest_agree(small: None) -> None:
    torch.manual_seed(0)
    for contest in module._cpu_contests(torch.float32, 3, 64, 48):
        results = [way() for way in contest.ways.values()]
        for result in results:
            torch.testing.assert_close(result, results[0])
