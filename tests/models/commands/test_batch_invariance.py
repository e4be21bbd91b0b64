"""Rows are compared alone and in batches, and what was found is written down."""

import json
from pathlib import Path

import pytest

from models.__main__ import main


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "batch-invariance.json"
    assert main(["batch-invariance", "digits", "--rows", "2,8", "--backends", "eager,fused", "--threads", "1", "--json", str(path)]) == 0  # fmt: skip  # noqa: E501
    assert "  in a batch, alone  " in capsys.readouterr().out
    document = json.loads(path.read_text())
    assert [(each["dtype"], each["backend"], each["batch_rows"]) for each in document["batch_invariance"]] == [
        (dtype, backend, size) for dtype in ("float32", "bfloat16") for backend in ("eager", "fused") for size in (2, 8)
    ]
    for each in document["batch_invariance"]:
        assert each["fault"] is None
        errors = each["alone_from_exact"]["absolute"] + each["batched_from_exact"]["absolute"]
        assert 0 <= each["batched_from_alone"]["absolute"] <= errors * 1.01
    facts = document["conditions"]
    assert (facts["dtype"], facts["threads"], facts["model"]["name"]) == ("float32, bfloat16", 1, "digits")


def test_what_a_list_names_twice_is_compared_once(tmp_path: Path) -> None:
    path = tmp_path / "batch-invariance.json"
    twice = ("--rows", "2, 2", "--backends", "eager,eager", "--dtype", "float32, float32")
    assert main(["batch-invariance", "digits", *twice, "--threads", "1", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert len(document["batch_invariance"]) == 1
    assert document["conditions"]["dtype"] == "float32"
