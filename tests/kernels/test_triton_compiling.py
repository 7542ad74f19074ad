"""Kernels are compiled in parallel before the first launch, and one that fails is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernels.triton.launching.kernel_cache import kernel_cache
from tests.support.triton_jobs import KERNEL_FILES
from tests.support.triton_versions import compiling_process


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of the compiling process by what it tried, in this order."""
    cache: Path = tmp_path_factory.mktemp("cache")
    answer: dict[str, dict[str, Any]] = json.loads(compiling_process("tests.support.triton_compiling", cache=cache))
    return answer


def test_recording_launches_runs_no_kernel_and_reports_each_variant_once(found: dict[str, dict[str, Any]]) -> None:
    asked = found["when_compiled_together"]
    assert asked["launched"] == 0
    assert asked["reports"] == [[3, 1, 0], [3, 2, 0], [3, 3, 0]]


def test_a_compiled_variant_is_launched_without_compiling_again(found: dict[str, dict[str, Any]]) -> None:
    assert found["when_compiled_together"]["loaded"] == 3
    assert found["when_launched_afterwards"] == {"launched": ["fill_kernel"] * 3, "loaded": 3}


def test_a_variant_requested_again_is_not_reported_again_and_can_be_launched(found: dict[str, dict[str, Any]]) -> None:
    result = found["when_requested_again_during_compilation"]
    assert result == {"described": 3, "last": [3, 3, 3], "launched": ["fill_kernel"] * 3}


def test_variants_found_on_disk_are_counted(found: dict[str, dict[str, Any]]) -> None:
    assert found["when_found_on_disk"]["last"] == [3, 3, 3]


def test_a_variant_that_cannot_be_compiled_is_named_each_time(found: dict[str, dict[str, Any]]) -> None:
    for message in found["when_a_kernel_does_not_compile"].values():
        assert message.startswith("wrong_kernel(out=*i32, BLOCK=")
        assert "num_warps=4" in message
        assert "incompatible dimensions" in message


def test_a_variant_that_cannot_be_loaded_is_named(found: dict[str, dict[str, Any]]) -> None:
    message = found["when_a_binary_cannot_be_loaded"]["error"]
    assert message == "fill_kernel(out=*i32, BLOCK=16, num_warps=4, num_stages=3): RuntimeError: no memory"


def test_a_variant_whose_compiler_hangs_is_named_and_does_not_delay_the_start(
    found: dict[str, dict[str, Any]],
) -> None:
    message = found["when_a_compilation_hangs"]["error"]
    assert message == "fill_kernel(out=*i32, BLOCK=16, num_warps=4, num_stages=3): its compiler has not ended after 1 s"
    assert found["when_a_compilation_hangs"]["compiled_then"] == [1, 1]


def test_launches_of_other_threads_run_and_are_not_recorded(found: dict[str, dict[str, Any]]) -> None:
    assert found["when_another_thread_launches"] == {"launched": ["fill_kernel"], "last": [2, 2, 2]}


def test_another_thread_can_launch_a_variant_that_is_being_compiled(found: dict[str, dict[str, Any]]) -> None:
    answer = found["when_another_thread_launches_a_kernel_being_compiled"]
    assert answer == {"launched": ["fill_kernel"] * 3, "last": [3, 3, 3]}


def test_two_variants_are_compiled_at_a_time(found: dict[str, dict[str, Any]]) -> None:
    assert found["when_two_compilations_wait_for_each_other"]["last"] == [2, 2, 2]


def test_threads_parse_kernels_one_at_a_time(found: dict[str, dict[str, Any]]) -> None:
    assert found["when_kernels_are_parsed_concurrently"]["last"] == [2, 2, 2]


def test_the_revision_of_the_kernels_depends_on_every_module_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def read_bytes(path: Path) -> bytes:
        read.append(path)
        return b""

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    kernel_cache()
    assert {*KERNEL_FILES.values()} <= {*read}
    assert not [path for path in read if "gate" in path.parts]
