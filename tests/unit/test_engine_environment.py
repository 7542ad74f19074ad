"""Environment variables that an engine sets before importing torch; those of the operator take precedence."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys

import pytest

from engine.environment import FP_FUSION, SPINS, prepare_environment

NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "MKL_CBWR")


@pytest.fixture
def before_torch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not imported torch, on an AMD processor, without any of the settings."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr("engine.environment._is_amd", lambda: True)
    return monkeypatch


def test_spin_count_and_mkl_instruction_set_are_set_by_default(before_torch: pytest.MonkeyPatch) -> None:
    prepare_environment()
    assert {name: os.environ.get(name) for name in NAMES} == {
        "GOMP_SPINCOUNT": str(SPINS),
        "OMP_WAIT_POLICY": None,
        "MKL_CBWR": "AVX2",
    }


@pytest.mark.parametrize(("name", "value"), [("GOMP_SPINCOUNT", "5"), ("OMP_WAIT_POLICY", "active")])
def test_an_operators_thread_wait_policy_is_kept(before_torch: pytest.MonkeyPatch, name: str, value: str) -> None:
    before_torch.setitem(os.environ, name, value)
    prepare_environment()
    assert os.environ[name] == value
    assert len({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)) == 1


def test_nothing_is_set_after_torch_was_imported_and_the_log_says_so(
    before_torch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before_torch.setitem(sys.modules, "torch", os)
    with caplog.at_level(logging.INFO, logger="gatehouse.engine"):
        prepare_environment()
    assert not set(NAMES) & set(os.environ)
    assert "GOMP_SPINCOUNT=10000, MKL_CBWR=AVX2 not set" in caplog.text


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_fused_multiply_add_is_enabled_unless_the_operator_disables_it(
    before: str | None, after: str, before_torch: pytest.MonkeyPatch
) -> None:
    before_torch.delitem(os.environ, FP_FUSION, raising=False)
    if before is not None:
        before_torch.setitem(os.environ, FP_FUSION, before)
    prepare_environment()
    assert os.environ[FP_FUSION] == after


def num_page_faults(environment: dict[str, str]) -> int:
    """Minor page faults of a process that allocates and frees the same megabytes twenty times after a first time."""
    program = """
import ctypes, resource
from engine.environment import configure_malloc
configure_malloc()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def work():
    buffers = [libc.malloc(5 << 20) for _ in range(4)]
    for buffer in buffers:
        ctypes.memset(buffer, 1, 5 << 20)
    for buffer in buffers:
        libc.free(buffer)
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    work()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
    completed = subprocess.run([sys.executable, "-c", program], env={**kept, **environment}, capture_output=True, check=True)
    return int(completed.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_for_reuse_unless_the_operator_sets_malloc_thresholds() -> None:
    assert num_page_faults({}) < 100
    assert num_page_faults({"MALLOC_TRIM_THRESHOLD_": "131072"}) > 10_000
