"""Waits of the step thread for a GPU have a limit, after which another thread ends the engine's process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from appliance.serving.supervisor import SILENCE_MAX_S
from engine.main import main
from engine.protocol import EngineFrame
from engine.runner import device_waits
from engine.runner.device_waits import HANG_POLLS, POLL_S, STEP_WAITS, DeviceWaits
from engine.transport import decode_engine_frame
from tests.support import forked_processes
from tests.support.engine_messages import engine_info, engine_status

DEADLINE_S = 120


class Event:
    """Replaces `torch.cuda.Event`: `meanwhile` is called while it is waited for."""

    def __init__(self, meanwhile: Callable[[], object]) -> None:
        self.synchronize = meanwhile


def polls_during(waits: DeviceWaits, number: int) -> list[bool]:
    """What polls find while a wait lasts."""
    found: list[bool] = []
    event: Any = Event(lambda: found.extend(waits.poll() for _ in range(number)))
    waits.wait_for(event)
    return found


def test_a_wait_that_lasts_too_long_is_found() -> None:
    assert polls_during(DeviceWaits(), HANG_POLLS + 1) == [False] * HANG_POLLS + [True]


def test_waits_that_end_are_not_added_up() -> None:
    waits = DeviceWaits()
    assert not any(any(polls_during(waits, HANG_POLLS)) for _ in range(3))


def test_a_thread_that_waits_for_nothing_does_not_hang() -> None:
    waits = DeviceWaits()
    polls_during(waits, HANG_POLLS)
    assert not any(waits.poll() for _ in range(2 * HANG_POLLS))


def test_a_wait_ends_with_an_error_of_the_device() -> None:
    waits = DeviceWaits()
    event: Any = Event(mock.Mock(side_effect=RuntimeError("illegal access")))
    with pytest.raises(RuntimeError, match="illegal access"):
        waits.wait_for(event)
    assert not any(waits.poll() for _ in range(2 * HANG_POLLS))


def test_the_engine_ends_itself_well_before_the_gateway_kills_it() -> None:
    assert 1.5 * HANG_POLLS * POLL_S < SILENCE_MAX_S


class HangingEngine:
    """Whose second step never ends on the device."""

    has_requests = True

    def __init__(self, noted: Path, device: str) -> None:
        self.info = engine_info(device=device)
        self._noted = noted
        self._steps = iter([SimpleNamespace(others=[], decoded=[])])

    def status(self, **_: object) -> object:
        return engine_status()

    def check_when_idle(self) -> None:
        """Nothing was freed."""

    def step_in_columns(self) -> object:
        for step in self._steps:
            return step
        event: Any = Event(threading.Event().wait)
        STEP_WAITS.wait_for(event)
        raise AssertionError("the wait does not end")

    def note_failure(self, error: Exception) -> None:
        self._noted.write_text(f"{type(error).__name__}: {error}")

    def __del__(self) -> None:
        self._noted.write_text("finalised, which would wait for the device")


def serve_by_a_device_that_hangs(connection: socket.socket, noted: str) -> int:
    """Run the engine's program in a process of its own."""
    engine = HangingEngine(Path(noted), "cuda")
    with (
        mock.patch("engine.main.build_engine", return_value=engine),
        mock.patch.object(device_waits, "HANG_POLLS", 3),
        mock.patch.object(device_waits, "POLL_S", 0.01),
    ):
        return main(["--fd", str(connection.detach()), "--options", '{"model": "any"}'])


def frames_until_end(connection: socket.socket) -> list[EngineFrame]:
    received = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    frames = []
    while received:
        end = 4 + int.from_bytes(received[:4])
        frames.append(decode_engine_frame(received[4:end]))
        received = received[end:]
    return frames


def test_an_engine_whose_step_does_not_end_notes_that_says_so_and_ends(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    log, noted = tmp_path / "log", tmp_path / "noted"
    with ours:
        with theirs:
            process = forked_processes.start(__name__, "serve_by_a_device_that_hangs", theirs, str(noted), log=log)
        ours.settimeout(DEADLINE_S)
        frames = frames_until_end(ours)
        assert forked_processes.wait_for_exit(process, DEADLINE_S) == 1
    told = "the GPU has not finished a step within 0 s"
    assert [frame.fatal for frame in frames[-2:]] == [None, told]
    assert noted.read_text() == f"DeviceHangs: {told}"
    assert f"the engine stops: {told}" in log.read_text()
