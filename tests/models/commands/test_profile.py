"""A forward pass is shown, drawn and traced."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from models import profile
from models.__main__ import main


def test_the_command_prints_tables_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", exc_type=ImportError)
    files = {name: tmp_path / f"out.{name}" for name in ("json", "png")}
    assert main(["profile", "digits", "--rows", "3", "--backends", "eager,fused", "--threads", "1", "--json", str(files["json"]), "--png", str(files["png"]), "--trace", str(tmp_path / "trace.json")]) == 0  # fmt: skip  # noqa: E501
    out = capsys.readouterr().out
    assert "eager (torch), 3 rows: " in out
    assert out.count("us unprofiled (median of 10)") == 2
    assert "fused (onednn), 3 rows: " in out
    document = json.loads(files["json"].read_text())
    assert [it["backend"] for it in document["profile"]] == ["eager", "fused"]
    assert document["profile"][0]["lines"]
    assert document["profile"][0]["unprofiled_us"] > 0
    assert document["conditions"]["forwards"] == profile.FORWARDS
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    for name, operator in (("eager", "aten::rms_norm"), ("fused", "aten::linalg_vector_norm")):
        events = json.loads((tmp_path / f"trace-{name}.json").read_text())["traceEvents"]
        assert operator in {event.get("name") for event in events}


@pytest.mark.slow
def test_the_command_keeps_kinetos_log_off_stderr() -> None:
    command = [sys.executable, "-m", "models", "profile", "digits", "--backends", "eager", "--rows", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert "profiler_start" not in done.stderr
