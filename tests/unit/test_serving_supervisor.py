"""Engine processes are started, monitored and restarted, and streams of a failed engine get an error."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from appliance.base.clock import Clock, SystemClock
from appliance.base.errors import EngineUnavailable, ModelLoading
from appliance.base.settings import ENGINE_SWITCHES
from appliance.serving import supervisor
from appliance.serving.supervisor import Supervisor, engine_environment
from engine.protocol import EngineFrame, GenerationRequest, SamplingParams
from engine.switches import SWITCHES
from tests.support.clock import FakeClock
from tests.support.fake_engine import DIE, STALL, command
from tests.support.polling import DEADLINE_S
from tests.support.received_events import submit_to

BUG = ["--fatal", "TypeError: a bug", "--bug"]


def make_request(first_token: int) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=3, seed=1)
    return GenerationRequest(request_id="req_1", tenant_id="bob", prompt_token_ids=[first_token], sampling=sampling)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 0.01)


def by_turns(*options: Sequence[str]) -> Callable[[int], list[str]]:
    """Return a command whose n-th fake engine process has the n-th options; the last options stay."""
    turns = chain(options, repeat(options[-1]))
    return lambda fd: command(fd, *next(turns))


@asynccontextmanager
async def supervised(
    command: Callable[[int], list[str]] = command, clock: Clock | None = None, **options: Any
) -> AsyncIterator[Supervisor]:
    """Yield a started supervisor of the processes of `command`."""
    watched = Supervisor(name="fake", command=command, clock=clock or SystemClock(), **options)
    watched.start()
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield watched
    finally:
        await watched.stop()


def send_signal(watched: Supervisor, number: int) -> int:
    """Send a signal to the engine process and return its id."""
    assert watched.pid is not None
    os.kill(watched.pid, number)
    return watched.pid


async def test_requests_get_model_loading_while_the_engine_loads() -> None:
    async with supervised() as watched:
        with pytest.raises(ModelLoading) as caught:
            submit_to(watched, make_request(5))

        assert caught.value.retry_after_s is not None
        await watched.wait_for_state("ready")
        assert (await submit_to(watched, make_request(5)).take())[0].token_ids


async def test_a_restart_knows_that_the_engine_has_served_on_a_gpu() -> None:
    started: list[bool] = []

    def command_on(fd: int) -> list[str]:
        started.append(watched.has_served_on_gpu)
        return command(fd, "--device", "cpu" if len(started) > 1 else "cuda")

    async with supervised(command_on) as watched:
        for _ in range(2):
            await watched.wait_for_state("ready")
            send_signal(watched, signal.SIGKILL)
            await watched.wait_for_state("restarting")
        await watched.wait_for_state("ready")
    assert started == [False, True, True]


async def test_a_killed_engine_is_restarted_and_its_streams_fail() -> None:
    async with supervised() as watched:
        await watched.wait_for_state("ready")
        stream = submit_to(watched, make_request(STALL))
        await asyncio.sleep(0)
        first_pid = send_signal(watched, signal.SIGKILL)
        with pytest.raises(EngineUnavailable):
            await stream.take()
        await watched.wait_for_state("restarting")
        assert watched.error is not None
        assert "signal 9" in watched.error
        await watched.wait_for_state("ready")

        assert watched.pid != first_pid
        assert watched.restarts == 1
        assert (await submit_to(watched, make_request(5)).take())[0].token_ids


async def test_during_a_restart_retry_after_is_the_expected_start_time() -> None:
    clock = FakeClock()

    def slow_command(fd: int) -> list[str]:
        clock.advance(9)
        return command(fd)

    async with supervised(slow_command, clock) as watched:
        await watched.wait_for_state("ready")
        stream = submit_to(watched, make_request(STALL))
        send_signal(watched, signal.SIGKILL)
        with pytest.raises(EngineUnavailable) as of_a_running_request:
            await stream.take()
        with pytest.raises(EngineUnavailable) as before_the_exit_is_known:
            submit_to(watched, make_request(5))
        await watched.wait_for_state("restarting")
        with pytest.raises(EngineUnavailable) as of_a_new_request:
            watched.check_ready()

    for refusal in (of_a_running_request, before_the_exit_is_known, of_a_new_request):
        assert refusal.value.retry_after_s == pytest.approx(9 + supervisor.BACKOFF_FIRST_S)


async def test_an_engine_crashed_by_a_request_is_restarted() -> None:
    async with supervised() as watched:
        await watched.wait_for_state("ready")
        stream = submit_to(watched, make_request(DIE))
        with pytest.raises(EngineUnavailable):
            await stream.take()
        await watched.wait_for_state("restarting")
        await watched.wait_for_state("ready")


async def test_a_hanging_engine_is_killed_and_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "SILENCE_MAX_S", 0.5)
    monkeypatch.setattr(supervisor, "SILENCE_POLL_S", 0.05)
    async with supervised() as watched:
        await watched.wait_for_state("ready")
        stream = submit_to(watched, make_request(STALL))
        send_signal(watched, signal.SIGSTOP)
        with pytest.raises(EngineUnavailable):
            await stream.take()
        await watched.wait_for_state("restarting")
        await watched.wait_for_state("ready")


async def test_an_engine_that_cannot_be_killed_fails_with_that_reason_until_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SILENCE_MAX_S", "EXIT_GRACE_S", "KILLED_GRACE_S"):
        monkeypatch.setattr(supervisor, name, 0.5)
    monkeypatch.setattr(supervisor, "SILENCE_POLL_S", 0.05)
    async with supervised() as watched:
        await watched.wait_for_state("ready")
        stream = submit_to(watched, make_request(STALL))
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.subprocess.Process, "kill", lambda _self: None)  # as of a process that waits in the kernel
            pid = send_signal(watched, signal.SIGSTOP)
            with pytest.raises(EngineUnavailable):
                await stream.take()
            await watched.wait_for_state("failed")
        assert watched.error is not None
        assert f"process {pid} cannot be ended" in watched.error
        assert watched.pid == pid
        os.kill(pid, signal.SIGKILL)
        await watched.wait_for_state("ready")


async def test_a_stop_does_not_wait_for_ever_for_an_engine_that_cannot_be_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXIT_GRACE_S", "KILLED_GRACE_S"):
        monkeypatch.setattr(supervisor, name, 0.1)
    watched = Supervisor(name="fake", command=command, clock=SystemClock())
    watched.start()
    async with asyncio.timeout(DEADLINE_S):
        await watched.wait_for_state("ready")
        process = watched._process
        assert process is not None
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.subprocess.Process, "kill", lambda _self: None)
            process.send_signal(signal.SIGSTOP)
            await watched.stop()
        process.kill()
        await process.wait()


async def test_an_engine_that_hangs_while_loading_is_killed_and_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LOADING_STALL_MAX_S", 0.2)
    monkeypatch.setattr(supervisor, "SILENCE_POLL_S", 0.05)
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    async with supervised(lambda _fd: hangs) as watched:
        await watched.wait_for_state("restarting")
    assert "signal 9" in str(watched.error)


async def test_a_model_that_cannot_be_loaded_fails_for_good_with_the_engines_error() -> None:
    async with supervised(by_turns(["--fatal", "no such tensor"])) as watched:
        await watched.wait_for_state("failed")

        with pytest.raises(EngineUnavailable, match="no such tensor"):
            watched.check_ready()


async def test_an_engine_that_never_becomes_ready_fails_after_five_attempts() -> None:
    async with supervised(by_turns(["--unknown-option"])) as watched:
        await watched.wait_for_state("failed")

        assert watched.restarts == supervisor.CRASHES_BEFORE_READY_MAX - 1


async def test_an_engine_that_ends_with_the_same_bug_twice_fails_after_two_attempts() -> None:
    async with supervised(by_turns(BUG)) as watched:
        await watched.wait_for_state("failed")

        assert watched.restarts == 1


async def test_a_failed_engine_with_a_bug_is_tried_again_after_the_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FAILED_PAUSE_S", 0.01)
    async with supervised(by_turns(BUG, BUG, BUG, [])) as watched:
        await watched.wait_for_state("failed")
        await watched.wait_for_state("ready")
    assert watched.restarts == 3


async def test_an_engine_that_ends_with_different_bugs_is_tried_again_at_once() -> None:
    async with supervised(by_turns(BUG, ["--fatal", "KeyError: 'a'", "--bug"], BUG, [])) as watched:
        await watched.wait_for_state("ready", "failed")
        assert watched.state == "ready"


async def test_an_engine_that_has_served_is_tried_again_at_once_after_the_same_bug() -> None:
    async with supervised(by_turns([], BUG, BUG, BUG, [])) as watched:
        await watched.wait_for_state("ready")
        send_signal(watched, signal.SIGKILL)
        await watched.wait_for_state("restarting")
        await watched.wait_for_state("ready", "failed")
        assert watched.state == "ready"


async def test_an_engine_that_failed_without_a_reason_of_its_own_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FAILED_PAUSE_S", 0.01)
    is_mended = False
    async with supervised(lambda fd: command(fd, *([] if is_mended else ["--unknown-option"]))) as watched:
        await watched.wait_for_state("failed")
        is_mended = True
        await watched.wait_for_state("ready")
    assert watched.error is None


async def test_a_reason_that_an_engine_has_after_it_has_served_is_not_final() -> None:
    async with supervised(by_turns([], ["--fatal", "the GPU is lost"], [])) as watched:
        await watched.wait_for_state("ready")
        send_signal(watched, signal.SIGKILL)
        await watched.wait_for_state("restarting")
        await watched.wait_for_state("ready")
    assert watched.restarts == 2


async def test_a_reason_that_may_pass_is_not_final_though_the_engine_has_never_served() -> None:
    next_command, reasons = by_turns(["--fatal", "no memory is left", "--may-pass"], []), []

    def note_reason(fd: int) -> list[str]:
        reasons.append(watched.error)
        return next_command(fd)

    async with supervised(note_reason) as watched:
        await watched.wait_for_state("ready", "failed")
    assert reasons == [None, "no memory is left"]


async def test_while_an_engine_has_failed_retry_after_is_the_expected_start_of_the_next_attempt() -> None:
    async with supervised(by_turns(["--unknown-option"])) as watched:
        await watched.wait_for_state("failed")
        with pytest.raises(EngineUnavailable) as refusal:
            watched.check_ready()

    assert refusal.value.retry_after_s == pytest.approx(supervisor.FAILED_PAUSE_S, abs=DEADLINE_S)


async def test_an_engine_process_that_cannot_be_started_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    start = asyncio.create_subprocess_exec
    failures = [OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))]

    async def start_or_fail(*arguments: Any, **options: Any) -> asyncio.subprocess.Process:
        if failures:
            raise failures.pop()
        return await start(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_or_fail)
    async with supervised() as watched:
        await watched.wait_for_state("restarting")
        assert watched.error == f"the process could not be started: {os.strerror(errno.EAGAIN)}"
        await watched.wait_for_state("ready")


async def test_an_engine_is_restarted_after_a_bug_in_the_processing_of_its_frames() -> None:
    bugs = [ZeroDivisionError("a bug")]

    def on_frame(frame: EngineFrame) -> None:
        if frame.status is not None and bugs:
            raise bugs.pop()

    async with supervised(on_frame=on_frame) as watched:
        await watched.wait_for_state("restarting")
        await watched.wait_for_state("ready")


async def test_an_engine_is_restarted_though_a_child_keeps_its_output_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "EXIT_GRACE_S", 0.1)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    leave_a_child = "import subprocess, sys; subprocess.Popen(['cat', sys.argv[1]])"
    try:
        async with supervised(lambda _fd: [sys.executable, "-c", leave_a_child, str(fifo)]) as watched:
            await watched.wait_for_state("restarting")
    finally:
        os.close(os.open(fifo, os.O_RDWR))  # ends the children


def test_an_engine_inherits_no_gatehouse_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GATEHOUSE_ADMIN_TOKEN", "GATEHOUSE_ADMIN_PASSWORD", "GATEHOUSE_DATABASE_URL"):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = engine_environment()

    assert not [name for name in environment if name.startswith("GATEHOUSE_")]
    assert environment["OMP_NUM_THREADS"] == "1"
    assert "PYTHONPATH" in environment


@pytest.mark.parametrize("switch", ENGINE_SWITCHES)
async def test_an_engine_gets_and_reports_the_switch_that_is_off(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, "0")  # the settings decide, not the environment
    async with supervised(switched_off=[switch]) as watched:
        await watched.wait_for_state("ready")

        assert watched.info is not None
        assert watched.info.switched_off == [f"GATEHOUSE_{switch.upper()}"]


async def test_a_stopped_engine_leaves_no_process_behind() -> None:
    async with supervised() as watched:
        await watched.wait_for_state("ready")
        pid = watched.pid
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
