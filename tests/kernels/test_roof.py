import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kernels import roof as module
from kernels.__main__ import main
from kernels.bench import elementwise_work, gated_linear_work, linear_work
from kernels.roof import Roof, Work, described, measured_roof

CPU = torch.device("cpu")


def test_the_floor_is_the_longer_of_moving_and_computing() -> None:
    roof = Roof(100.0, {torch.float32: 1000.0, torch.bfloat16: 4000.0})
    assert roof.floor_s(Work(200, 1000), torch.float32) == 2
    assert roof.floor_s(Work(200, 8000), torch.float32) == 8
    assert roof.floor_s(Work(200, 8000), torch.bfloat16) == 2


def test_work_counts_each_operand_once() -> None:
    assert linear_work(2, 3, 5, 4) == ((6 + 15 + 10) * 4, 60)
    assert linear_work(2, 3, 5, 4, operands=1) == ((6 + 15 + 20) * 4, 60)
    assert gated_linear_work(2, 3, 5, 2) == ((6 + 30 + 10) * 2, 120)
    assert elementwise_work(2, 3, 2, operands=2) == (36, 0)


def test_the_roof_is_the_best_try_of_the_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.COPY_BYTES, "cpu", 100)
    monkeypatch.setitem(module.PRODUCT_SIDES, "cpu", (10,))
    clock = [0.0]

    def takes(*seconds: float) -> Callable[[], None]:
        left = iter((0.0, *seconds))  # the first call is not timed
        return lambda: clock.__setitem__(0, clock[0] + next(left))

    calls = {10: [takes(0.25, 0.125, 0.5), takes(0.5, 0.25, 0.25)], 20: [takes(0.5, 0.5, 0.5), takes(0.5, 0.125, 2.0)]}
    monkeypatch.setattr(module, "_products", lambda rows, *_: calls[rows])
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.Tensor, "copy_", lambda *_: clock.__setitem__(0, clock[0] + 1))
    found = measured_roof(CPU, [torch.float32], [(20, 10, 10)], repetitions=3)
    assert found.flops_per_s[torch.float32] == 2 * 20 * 10 * 10 / 0.125


def test_a_cpus_products_are_pytorchs_and_onednns_with_a_packed_weight() -> None:
    mm, packed = (call() for call in module._products(70, 300, 1000, torch.float32, CPU))
    assert isinstance(mm, torch.Tensor)
    assert isinstance(packed, torch.Tensor)
    torch.testing.assert_close(mm, packed, rtol=1e-4, atol=1e-4)


def test_a_roof_reads_in_words() -> None:
    assert described(Roof(20e9, {torch.float32: 100e9, torch.bfloat16: 400e9})) == (
        "copy 20.0 GB/s; product in float32 0.100 TFLOP/s, ridge 5.0 FLOP per byte; "
        "product in bfloat16 0.400 TFLOP/s, ridge 20.0 FLOP per byte"
    )


def test_the_command_prints_the_roof_and_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(module.COPY_BYTES, "cpu", 2**12)
    monkeypatch.setitem(module.PRODUCT_SIDES, "cpu", (16,))
    assert main(["roof", "--device", "cpu", "--json", str(tmp_path / "roof.json")]) == 0
    out = capsys.readouterr().out
    assert "copy " in out
    assert "product in float32 " in out
    document = json.loads((tmp_path / "roof.json").read_text())
    assert document["roof"]["copy_gb_per_s"] > 0
    assert document["roof"]["ridge_flop_per_byte"]["float32"] > 0
    assert document["conditions"]["threads"] == torch.get_num_threads()


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "measured_roof", lambda *_: pytest.fail("measured"))
    assert main(["roof", "--json", str(tmp_path / "nodir" / "x.json")]) == 2
    sentence = capsys.readouterr().err
    assert sentence.count("\n") == 1
    assert f"--json: expected a directory to write x.json to, got {tmp_path / 'nodir'}" in sentence
