"""Marks of kernels that run for the first time: processes killed on purpose, failing devices, and folders that refuse marks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from engine.runner import kernel_trials
from engine.runner.kernel_trials import (
    DEATHS_MAX,
    SERVICE_FAULTS_S,
    DeviceHangs,
    KernelFault,
    KernelTrials,
    TrialsImpossible,
    wait_for,
)
from kernels.alternatives import GEMV, HOPPER, PRODUCTS, TILES
from tests.support import forked_processes

CHOICE = PRODUCTS[8, 1]
DEADLINE_S = 120
CUDA = torch.device("cuda", 0)


def trials_in(folder: Path, start: str = "start") -> KernelTrials:
    return KernelTrials(folder, start, torch.device("cpu"))


def end_while_running(folder: str, *alternatives: str) -> None:
    """Run in a process of its own: killed by itself while these alternatives run."""
    with trials_in(Path(folder)).running(*((CHOICE, name) for name in alternatives)):
        os.kill(os.getpid(), signal.SIGKILL)


def killed(folder: Path, *alternatives: str) -> None:
    process = forked_processes.start(__name__, "end_while_running", str(folder), *alternatives)
    assert forked_processes.wait_for_exit(process, DEADLINE_S) == -signal.SIGKILL


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that computes nothing any more after an error."""
    monkeypatch.setattr(kernel_trials, "is_lost", lambda _: True)


def marks(folder: Path) -> list[Path]:
    return [*folder.glob("*")]


def test_an_alternative_is_refused_when_starts_were_killed_while_it_ran(tmp_path: Path) -> None:
    for _ in range(DEATHS_MAX):
        killed(tmp_path, HOPPER)
    assert trials_in(tmp_path).refusals(CHOICE) == {HOPPER: "2 starts ended while it ran"}
    assert trials_in(tmp_path).refusals(CHOICE) == {HOPPER: "2 starts ended while it ran"}, "that holds for all later starts"


def test_one_killed_start_refuses_nothing_and_is_forgotten_when_the_next_one_ends_well(tmp_path: Path) -> None:
    killed(tmp_path, HOPPER, GEMV)
    trials = trials_in(tmp_path)
    assert trials.refusals(CHOICE) == {}
    assert trials.has_left((CHOICE, HOPPER))
    with trials.first_use(), trials.running((CHOICE, HOPPER)):
        pass
    assert not trials.has_left((CHOICE, HOPPER))
    assert trials.has_left((CHOICE, GEMV)), "it has not run again"
    assert len(marks(tmp_path)) == 1


def test_an_alternative_that_is_tried_well_and_then_ends_the_start_is_refused(tmp_path: Path) -> None:
    for _ in range(DEATHS_MAX):
        with trials_in(tmp_path).running((CHOICE, HOPPER)):
            pass
        killed(tmp_path, HOPPER)
    assert HOPPER in trials_in(tmp_path).refusals(CHOICE)


def test_killed_starts_of_another_model_refuse_nothing(tmp_path: Path) -> None:
    for _ in range(DEATHS_MAX):
        killed(tmp_path, HOPPER)
    other = trials_in(tmp_path, "another model")
    assert other.refusals(CHOICE) == {}
    assert not other.has_left((CHOICE, HOPPER))


def test_a_mark_of_a_process_that_lives_is_not_that_of_one_that_was_killed(tmp_path: Path) -> None:
    with trials_in(tmp_path).running((CHOICE, HOPPER)):
        assert len(marks(tmp_path)) == 1
        assert not trials_in(tmp_path).has_left((CHOICE, HOPPER))


def test_the_oldest_alternative_has_no_mark(tmp_path: Path) -> None:
    with trials_in(tmp_path / "none").running((CHOICE, TILES)):
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("error", [ValueError("its own"), KeyboardInterrupt()])
def test_an_error_that_leaves_the_device_in_order_refuses_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises(type(error)), trials_in(tmp_path).running((CHOICE, HOPPER)):
        raise error
    assert marks(tmp_path) == []


@pytest.mark.usefixtures("lost")
def test_a_device_that_fails_refuses_the_alternative_at_once_and_for_every_model(tmp_path: Path) -> None:
    told = "8-bit products of one row by Hopper kernel: the GPU failed: RuntimeError: illegal access; a new process"
    with pytest.raises(KernelFault, match=told), trials_in(tmp_path).running((CHOICE, HOPPER)):
        raise RuntimeError("illegal access\nFor debugging consider …")
    why = {HOPPER: "the GPU failed: RuntimeError: illegal access"}
    assert trials_in(tmp_path).refusals(CHOICE) == trials_in(tmp_path, "another model").refusals(CHOICE) == why
    assert trials_in(tmp_path).has_left((CHOICE, HOPPER))


def fail_while_running(name: str, trials: KernelTrials, *, serving: str) -> None:
    with trials.first_use():
        trials.serve((CHOICE, serving))
        with trials.running((CHOICE, name)):
            raise RuntimeError("illegal access")


@pytest.mark.usefixtures("lost")
def test_a_fault_refuses_what_runs_for_the_first_time_and_not_what_serves_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(KernelFault):
        fail_while_running(HOPPER, trials_in(tmp_path), serving=GEMV)
    assert [*trials_in(tmp_path).refusals(CHOICE)] == [HOPPER]


@pytest.mark.usefixtures("lost")
def test_a_fault_while_the_oldest_runs_refuses_what_serves_for_the_first_time(tmp_path: Path) -> None:
    with pytest.raises(KernelFault):
        fail_while_running(TILES, trials_in(tmp_path), serving=GEMV)
    assert [*trials_in(tmp_path).refusals(CHOICE)] == [GEMV]


def test_what_serves_is_marked_until_the_start_is_over(tmp_path: Path) -> None:
    trials = trials_in(tmp_path)
    with trials.first_use():
        trials.serve((CHOICE, HOPPER))
        trials.serve((CHOICE, HOPPER), (PRODUCTS[8, 8], HOPPER))
        assert len(marks(tmp_path)) == 2
    assert marks(tmp_path) == []


def fail_in_service(folder: Path, *alternatives: str) -> None:
    """What an engine that serves by these alternatives does when the device is lost."""
    error = RuntimeError("illegal access\nFor debugging consider …")
    trials_in(folder).record_service_fault([(CHOICE, name) for name in alternatives], error)


@pytest.mark.usefixtures("lost")
def test_an_alternative_is_refused_when_the_device_failed_repeatedly_while_it_served(tmp_path: Path) -> None:
    for number in range(DEATHS_MAX):
        assert not trials_in(tmp_path).has_left((CHOICE, HOPPER)), f"{number} faults may have another cause"
        fail_in_service(tmp_path, HOPPER)
    assert trials_in(tmp_path).has_left((CHOICE, HOPPER))
    assert trials_in(tmp_path).refusals(CHOICE) == {HOPPER: "the GPU failed 2 times within a day while it served"}
    assert trials_in(tmp_path, "another model").refusals(CHOICE) == {}


@pytest.mark.usefixtures("lost")
def test_a_start_that_ends_well_does_not_make_a_fault_in_service_forgotten(tmp_path: Path) -> None:
    for _ in range(DEATHS_MAX):
        trials = trials_in(tmp_path)
        with trials.first_use(), trials.running((CHOICE, HOPPER)):
            pass
        fail_in_service(tmp_path, HOPPER)
    assert [*trials_in(tmp_path).refusals(CHOICE)] == [HOPPER]


@pytest.mark.usefixtures("lost")
def test_faults_in_service_are_forgotten_after_a_day(tmp_path: Path) -> None:
    for _ in range(DEATHS_MAX):
        fail_in_service(tmp_path, HOPPER)
    for path in marks(tmp_path):
        os.utime(path, times=(0, path.stat().st_mtime - SERVICE_FAULTS_S - 1))
    assert trials_in(tmp_path).refusals(CHOICE) == {}
    assert marks(tmp_path) == []


@pytest.mark.usefixtures("lost")
def test_the_oldest_alternative_is_not_refused_for_faults_in_service(tmp_path: Path) -> None:
    fail_in_service(tmp_path, TILES)
    assert marks(tmp_path) == []


def test_an_error_in_service_that_leaves_the_device_in_order_leaves_no_mark(tmp_path: Path) -> None:
    fail_in_service(tmp_path, HOPPER)
    assert marks(tmp_path) == []


def test_a_device_that_hangs_in_service_leaves_a_mark_and_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_trials, "is_lost", mock.Mock(side_effect=AssertionError("it would wait for ever")))
    for _ in range(DEATHS_MAX):
        trials_in(tmp_path).record_service_fault([(CHOICE, HOPPER)], DeviceHangs("not finished"))
    assert [*trials_in(tmp_path).refusals(CHOICE)] == [HOPPER]


@pytest.mark.usefixtures("lost")
def test_a_fault_in_service_that_cannot_be_marked_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    fail_in_service(tmp_path / "file" / "trials", HOPPER)
    assert "cannot be written" in caplog.text


class Stuck:
    """An event of a device that never gets there; replaces `torch.cuda.Event`."""

    num_polls = 0

    def record(self) -> None:
        """Behind a kernel without end."""

    def query(self) -> bool:
        Stuck.num_polls += 1
        return False


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> type[Stuck]:
    monkeypatch.setattr(torch.cuda, "Event", Stuck)
    monkeypatch.setattr(kernel_trials, "HANG_POLLS", 3)
    monkeypatch.setattr(kernel_trials, "POLL_S", 0.0)
    monkeypatch.setattr(Stuck, "num_polls", 0)
    return Stuck


def test_a_device_that_does_not_end_is_not_waited_for_without_a_limit(stuck: type[Stuck]) -> None:
    with pytest.raises(DeviceHangs):
        wait_for(CUDA)
    assert stuck.num_polls == 3


@pytest.mark.usefixtures("stuck")
def test_an_alternative_that_does_not_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KernelFault), KernelTrials(tmp_path, "start", CUDA).running((CHOICE, HOPPER)):
        pass
    assert trials_in(tmp_path).refusals(CHOICE)[HOPPER].startswith("the GPU failed: DeviceHangs: not done after")


def test_nothing_runs_where_it_cannot_be_marked(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(TrialsImpossible, match="cannot be written"),
        trials_in(tmp_path / "file" / "trials").running((CHOICE, HOPPER)),
    ):
        pytest.fail("it runs")


def removed_by_another(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the process that wrote this mark remove it just before another one calls a function of `kernel_trials`."""
    module, function = getattr(kernel_trials, name.partition(".")[0]), name.partition(".")[2]
    called = getattr(module, function)

    def after_removal(*args: Any, **options: Any) -> Any:
        path.unlink(missing_ok=True)
        return called(*args, **options)

    monkeypatch.setattr(module, function, after_removal)


@pytest.mark.parametrize("name", ["Path.open", "fcntl.flock"])
def test_a_mark_that_is_removed_while_it_is_read_is_none(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    killed(tmp_path, HOPPER)
    removed_by_another(marks(tmp_path)[0], monkeypatch, name)
    assert not trials_in(tmp_path).has_left((CHOICE, HOPPER))
    assert caplog.records == []


@pytest.mark.usefixtures("lost")
def test_a_fault_that_cannot_be_written_still_ends_the_process_and_leaves_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = mock.Mock(side_effect=[None, None, None, OSError("no space left"), OSError("no space left")])
    monkeypatch.setattr(os, "fsync", full)  # of two marks and their folder, then of two faults
    with pytest.raises(KernelFault, match="illegal access"), trials_in(tmp_path).running((CHOICE, HOPPER), (CHOICE, GEMV)):
        raise RuntimeError("illegal access")
    assert trials_in(tmp_path).has_left((CHOICE, HOPPER))
    assert trials_in(tmp_path).has_left((CHOICE, GEMV))


@pytest.mark.parametrize("content", [b'{"start', b"[]", b'{"start": "s", "choice": 1, "alternative": "tiles"}', b"\xff"])
def test_a_mark_that_cannot_be_read_is_told_and_ignored(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mark-torn").write_bytes(content)
    (tmp_path / "mark-being-written").touch()
    assert trials_in(tmp_path).refusals(CHOICE) == {}
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["a mark of kernels on trial is ignored"]
