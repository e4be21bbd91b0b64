import json
import os
from pathlib import Path

import pytest
import torch

from kernels import checking, onednn
from kernels.__main__ import main
from kernels.checking import Check, check_all


@pytest.mark.slow
def test_the_command_compares_every_operator_on_the_device_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", os.environ.get("TRITON_INTERPRET", "0"))  # the command sets it for good
    assert main(["check", "--json", str(tmp_path / "checks.json")]) == 0
    checks = json.loads((tmp_path / "checks.json").read_text())
    names = {each["op"].split()[0] for each in checks if each["skipped"] is None}
    assert {"gated_activation", "gated_linear", "rms_gated_linear", "linear", "rms_norm", "layer_norm"} <= names
    implementations = {each["implementation"] for each in checks}
    assert implementations == ({"triton"} if device.type == "cuda" else {"interpreter", "onednn"})
    dtypes = {each["dtype"] for each in checks}
    assert dtypes == {"float32", "float16", "bfloat16"}


def test_what_cannot_run_here_is_said_and_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "unavailable", lambda _: "there is no oneDNN")
    (only,) = checking._check("onednn", torch.float32, (1, 19, 57), torch.device("cpu"))
    assert only == Check("linear", "onednn", torch.float32, (1, 19, 57), skipped="there is no oneDNN")


@pytest.mark.parametrize(("problem", "status"), [(None, 0), ("largest error 1 exceeds 0.1", 1)])
def test_the_command_fails_where_one_is_wrong_and_tells_the_interpreter_apart(
    problem: str | None,
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # the command sets it for good
    checks = [Check("linear", "interpreter", torch.float16, (1, 2, 3), problem)]
    monkeypatch.setattr(checking, "check_all", lambda _, dtypes: checks if dtypes == [torch.float16] else [])
    assert main(["check", "--device", "cpu", "--dtypes", "float16", "--json", str(tmp_path / "a.json")]) == status
    printed = capsys.readouterr().out
    assert f"interpreter  float16   1x2x3            linear: {problem or 'exact enough'}" in printed
    assert "not what a GPU runs" in printed
    (record,) = json.loads((tmp_path / "a.json").read_text())
    assert (record["dtype"], record["shape"], record["problem"]) == ("float16", [1, 2, 3], problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is present")
def test_a_gpu_that_is_absent_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--device", "cuda"]) == 2
    assert "no CUDA or ROCm GPU is present; use --device cpu" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no CUDA or ROCm GPU is present"):
        check_all(torch.device("cuda"))
    with pytest.raises(ValueError, match="device must be cpu or cuda, got meta"):
        check_all(torch.device("meta"))
