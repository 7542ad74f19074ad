"""The last frame of an engine that ends by itself says whether the gateway can expect another start to succeed."""

from __future__ import annotations

import socket
from unittest import mock

import pytest

from engine.errors import EngineBroken, EngineConfigError, WeightsError
from engine.main import main
from engine.runner.kernel_trials import KernelFault
from engine.transport import decode_engine_frame
from tests.support import forked_processes

DEADLINE_S = 120


def raised_after(cause: Exception, error: Exception) -> Exception:
    """Return `error` with the cause that it has when it was raised while `cause` was handled."""
    error.__context__ = cause
    return error


STAYS, MAY_PASS, BUG = (False, False), (True, False), (True, True)  # whether another start may succeed, whether it is a bug
REASONS: dict[str, tuple[Exception, tuple[bool, bool]]] = {
    "an option": (EngineConfigError("device", "is cuda"), STAYS),
    "the model": (WeightsError("no such tensor"), STAYS),
    "a new kernel": (KernelFault("illegal access"), MAY_PASS),
    "a lost device": (EngineBroken("the device is lost"), MAY_PASS),
    "a disk": (OSError("input/output error"), MAY_PASS),
    "main memory": (MemoryError("no room"), MAY_PASS),
    "the device, as torch says it": (RuntimeError("CUDA error: out of memory"), MAY_PASS),
    "a wrong type": (TypeError("unsupported operand"), BUG),
    "a missing key": (KeyError("rope_theta"), BUG),
    "an error after one of memory": (raised_after(MemoryError("no room"), ValueError("no rows")), MAY_PASS),
    "an error after a bug": (raised_after(KeyError("a"), ValueError("no rows")), BUG),
}


def start_in_vain(connection: socket.socket, reason: str) -> int:
    """Run the engine's program in a process of its own, whose start fails."""
    with mock.patch("engine.main.build_engine", side_effect=REASONS[reason][0]):
        return main(["--fd", str(connection.detach()), "--options", '{"model": "any"}'])


@pytest.mark.parametrize("reason", REASONS)
def test_a_reason_is_given_as_one_that_stays_may_pass_or_is_a_bug(reason: str) -> None:
    error, kind = REASONS[reason]
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = forked_processes.start(__name__, "start_in_vain", theirs, reason)
        ours.settimeout(DEADLINE_S)
        frame = decode_engine_frame(ours.recv(1000)[4:])
        assert forked_processes.wait_for_exit(process, DEADLINE_S) == 1
    assert str(error) in str(frame.fatal)
    assert (frame.may_pass, frame.is_bug) == kind
