"""The cores that a process may keep busy: affinity, cgroup quotas, the user's variables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cuflash.planning.cores import usable_cores
from cuflash.planning.device import HostLimits

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)), raising=False)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_affinity_is_the_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_cores(tmp_path) == 12
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5}, raising=False)
    assert usable_cores(tmp_path) == 2, "read again at every call"


def test_without_affinity_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cores(tmp_path) == 7
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize(
    ("value", "cores"),
    [("3", 3), ("4,2", 4), (" 5 ", 5), ("64", 12), ("0", 12), ("-1", 12), ("many", 12), ("", 12)],
)
def test_variables_are_an_upper_bound(
    name: str, value: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000", 12),
        ("400000 100000", 4),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("900000 50000", 12),
        ("nonsense", 12),
    ],
)
def test_quota_of_the_second_version(quota: str, cores: int, tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path / "sys/fs/cgroup/a/b/cpu.max", quota + "\n")
    assert usable_cores(tmp_path) == cores


def test_a_quota_above_holds_too(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path / "sys/fs/cgroup/a/b/cpu.max", "800000 100000\n")
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", "300000 100000\n")
    assert usable_cores(tmp_path) == 3


def test_in_a_container_the_mount_is_the_group(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/../../host/path\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert usable_cores(tmp_path) == 2


@pytest.mark.parametrize(("quota", "cores"), [("-1", 12), ("350000", 3), ("10000", 1)])
def test_quota_of_the_first_version(quota: str, cores: int, tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "7:memory:/x\n4:cpu,cpuacct:/a\n0::/unified\n")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", quota + "\n")
    write(tmp_path / "sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n")
    assert usable_cores(tmp_path) == cores


def test_the_plan_counts_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert HostLimits.query().threads == 1
