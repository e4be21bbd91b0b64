import os
from pathlib import Path

import pytest

from models import control_group
from models.control_group import available_cores, memory_bytes


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "250000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "900000 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
    ids=str,
)
def test_cores_are_those_of_the_affinity_within_the_quota_of_either_version_of_control_groups(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(control_group, "CONTROL_GROUP", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    assert available_cores() == cores


def test_the_memory_of_this_machine_is_known() -> None:
    assert 2**28 < memory_bytes() < 2**50


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max"}, None),
        ({"memory.max": str(2**28)}, 2**28),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, None),
        ({"memory/memory.limit_in_bytes": str(2**28)}, 2**28),
    ],
    ids=str,
)
def test_the_limit_of_a_control_group_of_either_version_counts(
    files: dict[str, str], limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_group, "CONTROL_GROUP", tmp_path)
    total = memory_bytes()
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert memory_bytes() == (limit or total)
