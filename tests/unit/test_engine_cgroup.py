"""Control group limits, versions 1 and 2, and the threads and memory derived from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import cgroup
from engine.environment import default_threads, num_cores
from engine.memory.main_memory import main_memory_bytes

GIB = 1 << 30
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file below the mount. The process is in the group `app/worker` of version 2 until a test says otherwise."""
    monkeypatch.setattr(cgroup, "MOUNT", tmp_path)
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")

    def write_file(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")

    write_file("membership", "0::/app/worker")
    return write_file


def test_a_group_without_limits_limits_neither_cores_nor_memory(write: Write) -> None:
    write("app/worker/cpu.max", "max 100000")
    write("app/worker/memory.max", "max")
    assert cgroup.cores() is None
    assert cgroup.memory_bytes() is None


def test_the_lowest_limit_between_the_group_and_the_root_holds(write: Write) -> None:
    write("app/worker/cpu.max", "400000 100000")
    write("app/cpu.max", "150000 100000")
    write("app/worker/memory.max", str(2 * GIB))
    write("app/memory.max", str(3 * GIB))
    assert cgroup.cores() == 1.5
    assert cgroup.memory_bytes() == 2 * GIB


def test_limits_of_the_mount_root_hold_if_the_path_of_the_group_is_outside_the_container(write: Write) -> None:
    write("membership", "0::/system.slice/docker-1.scope")
    write("cpu.max", "200000 100000")
    write("memory.max", str(GIB))
    assert cgroup.cores() == 2.0
    assert cgroup.memory_bytes() == GIB


def test_version_1_limits_are_read_from_the_hierarchy_of_each_controller(write: Write) -> None:
    write("membership", "4:memory:/app\n3:cpu,cpuacct:/app\n1:name=systemd:/\n0::/")
    write("cpu/app/cpu.cfs_quota_us", "250000")
    write("cpu/app/cpu.cfs_period_us", "100000")
    write("cpu/cpu.cfs_quota_us", "-1")
    write("cpu/cpu.cfs_period_us", "100000")
    write("memory/app/memory.limit_in_bytes", str(GIB))
    assert cgroup.cores() == 2.5
    assert cgroup.memory_bytes() == GIB


def test_limits_of_version_1_are_not_read_at_the_path_of_another_controller(write: Write) -> None:
    write("membership", "4:memory:/service\n3:cpu,cpuacct:/app")
    write("cpu/service/cpu.cfs_quota_us", "100000")
    write("cpu/service/cpu.cfs_period_us", "100000")
    write("memory/app/memory.limit_in_bytes", str(GIB))
    assert cgroup.cores() is None
    assert cgroup.memory_bytes() is None


def test_the_name_of_a_group_may_hold_a_colon(write: Write) -> None:
    write("membership", "0::/app:1")
    write("app:1/memory.max", str(GIB))
    assert cgroup.memory_bytes() == GIB


@pytest.mark.parametrize("quota", ["0 100000", "100000 0"])
def test_a_quota_that_no_process_could_run_with_limits_nothing(write: Write, quota: str) -> None:
    write("app/worker/cpu.max", quota)
    assert cgroup.cores() is None


def test_without_a_membership_file_nothing_is_limited(write: Write, tmp_path: Path) -> None:
    write("cpu.max", "100000 100000")
    (tmp_path / "membership").unlink()
    assert cgroup.cores() is None
    assert cgroup.memory_bytes() is None


@pytest.mark.parametrize(("quota", "cores", "threads"), [(None, 8, 7), (100.0, 8, 7), (2.5, 2, 1), (0.5, 1, 1)])
def test_default_threads_leave_one_core_free_within_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, cores: int, threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(cgroup, "cores", lambda: quota)
    assert num_cores() == cores
    assert default_threads() == threads


def test_main_memory_is_the_lower_of_the_machine_and_the_limit_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = main_memory_bytes()
    monkeypatch.setattr(cgroup, "memory_bytes", lambda: 64 << 20)
    assert main_memory_bytes() == 64 << 20
    monkeypatch.setattr(cgroup, "memory_bytes", lambda: whole + 1)
    assert main_memory_bytes() == whole
