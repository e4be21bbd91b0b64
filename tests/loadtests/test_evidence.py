"""What a comparison leaves behind can be read again as it was."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from loadtests.evidence import Evidence, EvidenceError, Knee, Latency, Run, Stages, read
from loadtests.output import OutputError


def evidence() -> Evidence:
    """Return a document with one run."""
    run = Run(
        backend="fused",
        round=0,
        loop="open",
        users=None,
        rate_per_s=100.0,
        seconds=2.0,
        sent=200,
        answered=190,
        errors={"overloaded": 10},
        checked=8,
        wrong=0,
        answered_in_time=180,
        latency_ms=Latency(1.5, 1.0, 2.0, 3.0, 4.0, 5.0),
        histogram=[(1.0, 100), (5.0, 90)],
        stages_ms=Stages(0.15, 0.05, 1.0, 0.1, 0.2),
        batch_rows={"1": 190},
        first_ms=9.0,
        server_cpu=0.8,
        server_gpu=None,
        generator_cpu=0.3,
        late_p99_ms=0.1,
        invalid=None,
    )
    knee = Knee("fused", 100.0, 104.0, [99.0, 101.0], None)
    return Evidence({"cores": 2}, "digits", {"fused": "onednn"}, 1, "json", 20.0, 0, ["x"], "now", [run], [knee])


def test_a_document_reads_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    evidence().write(path)
    assert read(path) == evidence()


def test_rates_are_over_the_measured_seconds() -> None:
    (run,) = evidence().runs
    assert (run.answered_per_s, run.goodput_per_s) == (95.0, 90.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 99}', '{"version": 1}', "[" * 100_000, "\0\0"])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(EvidenceError, match=r"other\.json: expected"):
        read(path)


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    evidence().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra": 1}))
    with pytest.raises(EvidenceError, match="extra"):
        read(path)


@pytest.mark.parametrize(
    ("place", "value", "where"),
    [
        (("rows",), "<script>", "rows"),
        (("objective_ms",), 0, "objective_ms"),
        (("backends",), [], "backends"),
        (("runs", 0, "seconds"), 0, "runs.0.seconds"),
        (("runs", 0, "loop"), "shape", "runs.0.loop"),
        (("runs", 0, "sent"), -1, "runs.0.sent"),
        (("runs", 0, "sent"), 1.5, "runs.0.sent"),
        (("runs", 0, "latency_ms", "p99"), float("nan"), "runs.0.latency_ms.p99"),
        (("runs", 0, "latency_ms", "p99"), 1e308, "runs.0.latency_ms.p99"),
        (("runs", 0, "errors"), {"a": None}, "runs.0.errors.a"),
        (("runs", 0, "batch_rows"), {"many": 1}, "runs.0.batch_rows.many"),
        (("runs", 0, "histogram"), [[1]], "runs.0.histogram.0"),
        (("knees", 0, "rate_per_s"), 0, "knees.0.rate_per_s"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_field_that_holds_something_else_is_named(
    tmp_path: Path, place: tuple[str | int, ...], value: object, where: str
) -> None:
    path = tmp_path / "compare.json"
    evidence().write(path)
    document: Any = json.loads(path.read_text())
    inner = document
    for part in place[:-1]:
        inner = inner[part]
    inner[place[-1]] = value
    path.write_text(json.dumps(document))
    with pytest.raises(EvidenceError, match=rf"compare\.json: expected .* got in the field {re.escape(where)}"):
        read(path)


def test_what_is_no_file_is_not_read() -> None:
    with pytest.raises(EvidenceError, match=r"/dev/zero: expected .* got something else than a file"):
        read(Path("/dev/zero"))


def test_a_document_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "compare.json"
    evidence().write(path)
    before = path.read_text()
    (tmp_path / "compare.json.part").mkdir()
    with pytest.raises(OutputError, match=r"compare\.json: expected a file that can be written"):
        evidence().write(path)
    assert path.read_text() == before
