"""The script behind `make gpu`, as far as it goes without a GPU; no test relies on how long anything takes."""

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.__main__ import _parser as kernels_parser
from models.backends import paths
from models.conditions import conditions
from models.gpu import __main__ as script
from models.gpu import steps
from models.gpu.page import markdown
from models.gpu.plan import PLANS, Plan, ready_engine, write_model
from models.gpu.report import Report
from models.gpu.transfer import measure_transfer
from models.staging import Passage

pytestmark = pytest.mark.usefixtures("small_roof")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path, time.monotonic() + 600)


@no_gpu
def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("python -m models.gpu: error: expected a CUDA or ROCm device, torch ")
    assert captured.err.count("\n") == 1


def test_figures_of_a_cpu_are_not_put_among_those_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--device", "cpu"]) == 2
    assert "--out: expected a directory with --device cpu" in capsys.readouterr().err
    assert script.main(["--device", "cpu", "--out", "/dev/null"]) == 2
    assert "--out: expected a directory to write to, got /dev/null, which is a file" in capsys.readouterr().err
    for flag in ("--out", "--dtype"):
        with pytest.raises(SystemExit, match="2"):
            script.main(["--device", "cpu", flag, ""])
        assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Note what would be run of `python -m kernels`, whose own tests run it."""
    noted: list[tuple[str, ...]] = []

    def note(report: Report, name: str, arguments: tuple[str, ...], limit_s: float) -> None:
        assert 0 < limit_s <= steps.CHECK_S
        noted.append((name, *arguments))

    monkeypatch.setattr(steps, "kernels_command", note)
    return noted


@no_gpu
def test_a_dry_run_measures_tiny_shapes_and_writes_every_file(tmp_path: Path, commands: list[tuple[str, ...]]) -> None:
    before = paths.FILE.read_text()
    assert script.main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    shape = "geglu-32x48x2"
    assert {path.name for path in tmp_path.iterdir()} == {
        *(
            "gpu-paths.json",
            f"gpu-bench-{shape}.json",
            f"gpu-transfer-{shape}.json",
            "gpu-profile.json",
            "gpu-summary.json",
            "gpu.md",
        ),
        *("gpu-trace-eager.json", "gpu-trace-fused.json"),
    }
    summary = json.loads((tmp_path / "gpu-summary.json").read_text())
    assert commands == [("check-float16", "check", "--dtypes", "float16", "--device", "cpu")]
    assert [(it["step"], it["state"]) for it in summary["steps"]] == [
        ("kernels check", "done"),
        ("paths", "done"),
        (f"bench {shape}", "done"),
        (f"transfer {shape}", "done"),
        (f"profile {shape}", "done"),
    ]
    assert summary["conditions"]["dtype"] == "bfloat16"
    chosen = json.loads((tmp_path / "gpu-paths.json").read_text())["chosen"]["cpu"]["bfloat16"]["32x48"]
    assert set(chosen) == {"1", "8"}
    document = json.loads((tmp_path / f"gpu-bench-{shape}.json").read_text())
    assert [(it["rows"], it["backend"]) for it in document["bench"]] == [
        *((1, "eager"), (1, "fused"), (8, "eager"), (8, "fused")),
    ]
    transfer = json.loads((tmp_path / f"gpu-transfer-{shape}.json").read_text())["transfer"]
    assert [(it["rows"], it["backend"], it["way"]) for it in transfer] == [
        (rows, backend, way)
        for rows in (1, 8)
        for backend in ("eager", "fused")
        for way in ("unstaged", "staged", "overlapped")
    ]
    text = (tmp_path / "gpu.md").read_text()
    assert f"## {shape}" in text
    assert "| 8 | fused | " in text
    assert f"## {shape}: from the host and back" in text
    assert "| 8 | fused | overlapped | " in text
    assert "mkldnn::_linear_pointwise" in text
    assert paths.FILE.read_text() == before  # a CPU's choice is no GPU's


def test_a_backend_that_cannot_run_is_named_and_the_others_measured(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.backends.fused.unavailable", lambda _: "no post-ops here")
    path = write_model(tmp_path, (8, 8, 1))
    engine, absent = ready_engine(PLANS["cpu"], path, "cpu", "float32")
    assert absent == "done without fused (no post-ops here)"
    assert list(engine.backends) == ["eager"]


def test_answers_that_are_not_the_engines_fail_the_step_of_the_transfer(
    tmp_path: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = Passage.result
    monkeypatch.setattr(Passage, "result", lambda passage: result(passage).roll(1))
    report.found["conditions"] = {}
    path = write_model(tmp_path, (8, 8, 1))
    with pytest.raises(RuntimeError, match=r"eager, 1 rows, staged: an answer is .* from the engine's"):
        measure_transfer(report, PLANS["cpu"], path, "cpu", "float32")


def test_a_step_that_fails_is_reported_and_the_next_one_taken(report: Report) -> None:
    def fail() -> None:
        raise RuntimeError("out of luck\nand more")

    report.step("first", fail)
    report.step("second", lambda: None)
    report.step("third", lambda: "done without compiled (no compiler)")
    assert [(it["step"], it["state"]) for it in report.steps] == [
        ("first", "failed: RuntimeError: out of luck"),
        ("second", "done"),
        ("third", "done without compiled (no compiler)"),
    ]


def test_no_step_begins_after_the_budget(tmp_path: Path) -> None:
    report, taken = Report(tmp_path, time.monotonic() - 1), []
    report.step("late", lambda: taken.append("late"))
    assert taken == []
    assert report.steps[0]["state"] == "left out: no time was left"


def test_a_step_ends_where_the_budget_does_and_none_follows(tmp_path: Path) -> None:
    report = Report(tmp_path, time.monotonic() + 60)
    left_s: list[float] = []
    ended: list[str] = []

    def endless() -> None:
        while len(ended) < 2:
            with suppress(Exception):  # as what tries one tile after another
                try:
                    left_s.append(signal.getitimer(signal.ITIMER_REAL)[0])
                    report.deadline = time.monotonic()
                    signal.setitimer(signal.ITIMER_REAL, 0.01)  # what is left of its time passes sooner
                    time.sleep(60)
                finally:
                    ended.append("endless")

    handler = signal.getsignal(signal.SIGALRM)
    report.step("endless", endless)
    report.step("next", lambda: None)
    assert ended == ["endless"]
    assert 0 < left_s[0] <= 60
    assert [it["state"] for it in report.steps] == ["stopped: no time was left", "left out: no time was left"]
    assert signal.getsignal(signal.SIGALRM) is handler


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("pass", None),
        ("import sys; sys.exit('linear: off by one')", "failed with exit status 1: linear: off by one"),
        ("import time; time.sleep(60)", "stopped: no time was left"),
    ],
)
def test_what_the_kernels_commands_end_with_is_the_state_of_the_step(
    report: Report, monkeypatch: pytest.MonkeyPatch, code: str, state: str | None
) -> None:
    genuine, commands = subprocess.run, []

    def run(command: list[str], **options: Any) -> Any:
        commands.append(command)
        assert options["timeout"] == limit_s
        return genuine([sys.executable, "-c", code], **options)

    monkeypatch.setattr(subprocess, "run", run)
    limit_s = 0.1 if "sleep" in code else 60.0
    assert steps.kernels_command(report, "roof", ("roof", "--threads", "1"), limit_s) == state
    file = str(report.out / "gpu-kernels-roof.json")
    assert commands == [[sys.executable, "-m", "kernels", "roof", "--threads", "1", "--json", file]]


def test_the_kernels_commands_have_the_options_that_they_are_given(
    report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Any] = []

    def parse(report: Report, name: str, arguments: tuple[str, ...], limit_s: float) -> None:
        parsed.append(kernels_parser().parse_args([*arguments, "--json", name]))

    monkeypatch.setattr(steps, "kernels_command", parse)
    plan = PLANS["cuda"]
    assert steps.check_operators(report, ("float32", "bfloat16")) is None
    assert steps.tune_operators(report, plan, "gated_linear,rms_gated_linear", (768, 3072), "bfloat16") is None
    report.write("kernels-bench", {"liger": "not installed", "rows": []})
    assert steps.measure_operators(report, plan) is None
    assert sorted(it.dtypes for it in parsed[:2]) == [["bfloat16"], ["float32"]]
    tuned, benched = parsed[2:]
    assert (tuned.ops, tuned.widths) == (["gated_linear", "rms_gated_linear"], [(768, 3072)])
    assert tuple(tuned.rows) == tuple(benched.rows) == plan.rows
    assert (tuned.few, tuned.seconds) == (True, steps.TUNE_S)


def test_each_dtype_that_fails_its_check_is_named(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "kernels_command", lambda _, name, *__: "is wrong" if name == "check-float16" else None)
    assert steps.check_operators(report, ("float32", "float16")) == "float16 is wrong"


def test_what_was_tuned_and_the_operators_stand_in_the_page(report: Report) -> None:
    entry = {"in_features": 768, "out_features": 3072, "rows_measured": 8}
    report.found |= {
        "conditions": conditions(torch.device("cpu"), torch.bfloat16, 1),
        "tune": [
            entry | {"microseconds": 7.5, "separate_microseconds": 9.0, "is_folded": True},
            entry | {"microseconds": 7.5},  # of an operator that has nothing to fold
        ],
        "operators": {
            "liger": "not installed: pip install liger-kernel",
            "rows": [
                {"op": "mlp silu", "way": "triton", "dtype": "bfloat16", "shape": [8, 768, 3072], "cold": False}
                | {"median_us": 9.25, "low_us": 9.0, "high_us": 9.5, "roof_percent": 41.6}
            ],
        },
    }
    text = markdown(report)
    assert text.count("| 768x3072 | 8 | 7.5 | 9 | folded |") == text.count("| 768x3072 |") == 1
    assert "Liger's MLP: not installed: pip install liger-kernel." in text
    assert "| mlp silu | triton | bfloat16 | 8x768x3072 | warm | 9.25 (9 to 9.5) | 42 |" in text


def test_recorded_paths_join_those_of_other_gpus(paths_file: Path) -> None:
    paths_file.write_text('{"A": {"bfloat16": {"8x8": {"1": "dual"}, "4x4": {"1": "dual"}}}}')
    paths.record({"A": {"bfloat16": {"8x8": {"2": "split"}}}, "B": {"float16": {"8x8": {"1": "library"}}}})
    joined = {
        "A": {"bfloat16": {"8x8": {"2": "split"}, "4x4": {"1": "dual"}}},
        "B": {"float16": {"8x8": {"1": "library"}}},
    }
    assert paths.table() == joined
    assert json.loads(paths_file.read_text()) == joined


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device")
def test_on_a_gpu_paths_backends_and_profile_are_measured(
    paths_file: Path, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths_file.write_text("{}")
    monkeypatch.setattr(steps, "kernels_command", lambda *_: None)
    monkeypatch.setattr(steps, "measure_operators", lambda *_: None)
    script.measure(report, Plan(((64, 96, 2),), (1, 64), 64, 2, ("eager", "fused")), "cuda", "bfloat16")
    assert {it["state"] for it in report.steps} == {"done"}
    assert json.loads(paths_file.read_text())[torch.cuda.get_device_name()]["bfloat16"]["64x96"].keys() == {"1", "64"}
