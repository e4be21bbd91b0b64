"""The backends are timed, and what was found is written down."""

import json
from pathlib import Path

import pytest
import torch

from models.__main__ import main
from tests.command_line import refused

pytestmark = pytest.mark.usefixtures("small_roof")


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    assert main(["bench", "digits", "--rows", "1,3", "--backends", "eager,fused", "--threads", "1", "--repetitions", "2", "--json", str(path)]) == 0  # fmt: skip  # noqa: E501
    out = capsys.readouterr().out
    assert "roof: copy" in out
    assert "geometric mean of eager's time over fused's" in out
    document = json.loads(path.read_text())
    assert [(it["rows"], it["backend"], it["implementation"]) for it in document["bench"]] == [
        *((1, "eager", "torch"), (1, "fused", "onednn")),
        *((3, "eager", "torch"), (3, "fused", "onednn")),
    ]
    facts = document["conditions"]
    assert (facts["threads"], facts["dtype"], facts["repetitions"], facts["is_cold"]) == (1, "float32", 2, False)
    assert facts["torch"] == torch.__version__
    assert facts["model"]["name"] == "digits"
    assert all(it["ratio"] == 1 for it in document["bench"] if it["backend"] == "eager")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["digits", "--rows", "1,x"], "argument --rows: expected a positive integer, got 'x'"),
        (["digits", "--rows", "0"], "argument --rows: expected a positive integer, got '0'"),
        (["digits", "--repetitions", "0"], "expected a positive integer, got '0'"),
        (["digits", "--backends", "fusd"], "expected one of eager, compiled, fused, got 'fusd'"),
        (["digits", "--dtype", "int8"], "dtype: expected one of float32"),
        (["nowhere"], "nowhere"),
    ],
    ids=lambda it: "-".join(it) if isinstance(it, list) else "",
)
def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    assert sentence in refused(main, capsys, "bench", *arguments)
