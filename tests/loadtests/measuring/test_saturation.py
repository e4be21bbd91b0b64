import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs import render
from loadtests.affinity import listed
from loadtests.errors import LoadTestError
from loadtests.measuring.saturation import SaturatedRound, Saturation, mean_batch_rows, model_alone, ways
from loadtests.peers.servers import threads
from tests.loadtests.faulty_server import faulty_server, reply

ROOT = Path(__file__).parents[3]


def test_a_ratio_is_taken_within_each_round() -> None:
    each = Saturation(("--workers", "1"), [SaturatedRound(90, 16, 16, 100), SaturatedRound(800, 32, 32, 1000)])
    document = each.document()
    assert document["ratio"] == {"median": 0.85, "min": 0.8, "max": 0.9}
    assert document["batch_rows"] == {"median": 24, "min": 16, "max": 32}
    assert document["rounds"][0]["served_rows_per_s"] == 90


def test_a_worker_a_core_is_another_way_where_there_are_several() -> None:
    flags = [[each.flags for each in ways(cores)] for cores in (1, 2)]
    one, several = ("--workers", "1", "--threads"), ("--workers", "2", "--threads", "1")
    assert flags == [[(*one, "1")], [(*one, "2"), several]]


def test_a_way_that_was_never_loaded_has_no_figures() -> None:
    assert ways(2)[0].document()["ratio"] is None


@pytest.mark.slow
def test_the_model_alone_is_measured_in_batches_of_the_size_that_is_asked_for(tiny_model: Path) -> None:
    rows, rows_per_s = model_alone(str(tiny_model), 3)
    assert rows == 3
    assert rows_per_s > 0
    with pytest.raises(LoadTestError, match=r"models bench /nowhere: .* expected a directory"):
        model_alone("/nowhere", 3)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
@pytest.mark.skipif(threads() < 2, reason="this process may use one core alone")
def test_each_way_is_loaded_in_each_round_from_another_core_and_written_with_its_conditions(
    tiny_model: Path, tmp_path: Path
) -> None:
    *server, generator = sorted(os.sched_getaffinity(0))
    file = tmp_path / "saturation.json"
    command = [sys.executable, "-m", "loadtests", "saturation", str(tiny_model), "--json", str(file)]
    command += ["--rows", "2", "--connections", "3", "--rounds", "1", "--seconds", "1"]
    command += ["--server-cpus", listed(server)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    expected = ways(len(server))
    assert [each["flags"] for each in document["saturation"]] == [list(each.flags) for each in expected]
    for each in document["saturation"]:
        (only,) = each["rounds"]
        assert 2 <= only["batch_rows"] <= 2 * 3
        assert only["model_batch_rows"] == round(only["batch_rows"])
        assert each["ratio"]["median"] == pytest.approx(only["served_rows_per_s"] / only["model_rows_per_s"], rel=1e-3)
    assert document["ended_early"] is None
    conditions = document["conditions"]
    assert {"processor", "commit", "wire"} <= set(conditions)
    assert done.stdout.count("rows/s in batches of") == len(expected)
    assert "medians of 1 interleaved loads" in render.saturation(document)
    cores = f"{threads()} cores: the server on {listed(server)}, wrk {conditions['wrk']} on {generator}"
    assert cores in render.saturation(document)
    document |= {"ended_early": "interrupted"}
    document["saturation"][0] = expected[0].document()
    assert "loads of 1 s (interrupted)" in render.saturation(document)
    assert f"`{' '.join(expected[0].flags)}` | not measured" in render.saturation(document)


def test_a_server_without_the_metric_is_told() -> None:
    with faulty_server(lambda *_: reply(b"")) as server, pytest.raises(LoadTestError, match="metrics"):
        mean_batch_rows(server.server_address[1])
