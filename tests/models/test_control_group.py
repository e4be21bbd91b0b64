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


@pytest.mark.parametrize(
    ("membership", "files", "cores", "limit"),
    [
        ("0::/system.slice/mlp.service", {"system.slice/mlp.service/cpu.max": "200000 100000"}, 2, None),
        ("0::/a/b", {"a/cpu.max": "100000 100000", "a/b/cpu.max": "300000 100000"}, 1, None),
        ("0::/a/b", {"a/memory.max": "max", "a/b/memory.max": str(2**28), "memory.max": str(2**29)}, 4, 2**28),
        ("3:cpuset:/a\n2:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "1", "cpu/a/cpu.cfs_period_us": "1"}, 1, None),
        ("3:memory:/a:b", {"memory/a:b/memory.limit_in_bytes": str(2**28)}, 4, 2**28),
        ("0::/a", {"b/cpu.max": "100000 100000", "b/memory.max": "1"}, 4, None),
        ("0::/../b", {"memory.max": str(2**28)}, 4, 2**28),
        ("0::/a\x1c\u2028b\r", {"a\x1c\u2028b\r/memory.max": str(2**28)}, 4, 2**28),
        ("0::/\udcff", {"\udcff/cpu.max": "100000 100000"}, 1, None),  # a byte that is no text
    ],
    ids=ascii,
)
def test_the_least_limit_of_the_groups_that_a_process_is_in_counts(
    membership: str,
    files: dict[str, str],
    cores: int,
    limit: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_group, "CONTROL_GROUP", tmp_path / "groups")
    monkeypatch.setattr(control_group, "MEMBERSHIP", tmp_path / "membership")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    total = memory_bytes()  # where no membership is told
    (tmp_path / "membership").write_bytes(os.fsencode(f"{membership}\n"))
    for name, text in files.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert (available_cores(), memory_bytes()) == (cores, limit or total)
