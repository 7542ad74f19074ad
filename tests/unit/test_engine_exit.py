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
REASONS: dict[str, tuple[Exception, bool]] = {
    "an option": (EngineConfigError("device", "is cuda"), False),
    "the model": (WeightsError("no such tensor"), False),
    "a new kernel": (KernelFault("illegal access"), True),
    "a lost device": (EngineBroken("the device is lost"), True),
    "a disk": (OSError("input/output error"), True),
    "main memory": (MemoryError("no room"), True),
}


def start_in_vain(connection: socket.socket, reason: str) -> int:
    """Run the engine's program in a process of its own, whose start fails."""
    with mock.patch("engine.main.build_engine", side_effect=REASONS[reason][0]):
        return main(["--fd", str(connection.detach()), "--options", '{"model": "any"}'])


@pytest.mark.parametrize("reason", REASONS)
def test_only_a_reason_in_model_or_options_is_given_as_one_that_stays(reason: str) -> None:
    error, may_pass = REASONS[reason]
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = forked_processes.start(__name__, "start_in_vain", theirs, reason)
        ours.settimeout(DEADLINE_S)
        frame = decode_engine_frame(ours.recv(1000)[4:])
        assert forked_processes.wait_for_exit(process, DEADLINE_S) == 1
    assert str(error) in str(frame.fatal)
    assert frame.may_pass == may_pass
