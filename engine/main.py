"""The engine process: `python -m engine.main --fd N --options JSON`, started by the gateway with one inherited socket.

It sends every frame that is due and exits when the gateway closes the socket; SIGINT is left to the gateway. Exit
status 0 is an orderly end, 1 a failure (the last frame says why), 2 a wrong command line.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import NoReturn

from engine.environment import prepare_environment
from engine.errors import EngineBroken, EngineError
from engine.options import EngineOptions
from engine.protocol import EngineFrame, TokenEvent
from engine.transport import FrameSocket, PeerClosed, TransportError, decode_gateway_frame

prepare_environment()

from engine.build import build_engine  # noqa: E402 - torch must see the environment set above
from engine.loop import Engine  # noqa: E402
from engine.runner.device_waits import watch_steps  # noqa: E402
from engine.runner.kernel_trials import DeviceHangs  # noqa: E402

STATUS_INTERVAL_S = 0.5
PROGRESS_INTERVAL_S = 0.25
LOAD_REPORT_FRACTION = 0.02
DRAIN_TIMEOUT_S = 5.0
FATAL_CHARS_MAX = 1000
BUGS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, NotImplementedError, TypeError, ValueError)
"""Not RuntimeError, which torch raises for a device, nor what torch and Triton derive from it."""
INTER_TOKEN_TARGET_MS = 50.0
"""The default of a server: twenty tokens per second, faster than people read."""

log = logging.getLogger("gatehouse.engine")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one model over one socket until told to stop; returns the exit status. Ends the process where it cannot serve."""
    options = parse_arguments(arguments)
    # The gateway stamps each line with the time when it copies it into its own log.
    logging.basicConfig(stream=sys.stderr, level=options.log_level.upper(), format="%(levelname)s %(name)s %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with closing(FrameSocket(socket.socket(fileno=options.fd))) as connection:
        try:
            return run(connection, options)
        except PeerClosed:
            log.info("the gateway closed the socket")
            return 0
        except TransportError:
            log.exception("the gateway cannot be reached")
            return 1


def run(connection: FrameSocket, options: argparse.Namespace) -> int:
    """Load and serve; send the gateway the reason of an exit that it did not request."""
    try:
        engine = build_engine(_engine_options(options), progress=LoadReport(connection))
        log.info("ready model=%s kernels=%s kv_blocks=%d", engine.info.model, engine.info.kernels, engine.info.num_kv_blocks)
        gc.collect()
        gc.freeze()  # a full collection over all that torch and Triton keep would be the longest gap between two tokens
        connection.send(EngineFrame(ready=engine.info, status=engine.status()))
        if engine.info.device == "cuda":
            watch_steps(partial(_end_hanging, engine, connection))
        serve(engine, connection)
        return 0
    except TransportError:
        raise
    except EngineError as error:
        log.error("the engine stops: %s", error)
        _die(connection, str(error), may_pass=isinstance(error, EngineBroken))
    except Exception as error:
        log.exception("the engine stops because of a bug or a broken device")
        _die(connection, f"{type(error).__name__}: {error}"[:FATAL_CHARS_MAX], may_pass=True, is_bug=_is_bug(error))
    finally:
        gc.unfreeze()  # or Triton's bindings print forty lines about leaked objects at exit


def _end_hanging(engine: Engine, connection: FrameSocket, error: DeviceHangs) -> NoReturn:
    """Called by another thread: that of the steps waits in CUDA and sends nothing."""
    try:
        engine.note_failure(error)
    finally:
        log.error("the engine stops: %s", error)
        _die(connection, str(error), may_pass=True)


def _is_bug(error: BaseException | None) -> bool:
    """Return whether neither `error` nor an error before it comes from memory, a device or a file."""
    while isinstance(error, BUGS):
        error = error.__cause__ or error.__context__
    return error is None


def _die(connection: FrameSocket, reason: str, *, may_pass: bool, is_bug: bool = False) -> NoReturn:
    """Exit with status 1. The last frame says why, and whether another start may succeed with the same model and options.
    Nothing is freed: on a GPU that is lost, torch (2.11) aborts the process as soon as Python frees page-locked memory."""
    try:
        connection.send(EngineFrame(fatal=reason, may_pass=may_pass, is_bug=is_bug))
        connection.drain(DRAIN_TIMEOUT_S)
    finally:
        logging.shutdown()
        os._exit(1)


class LoadReport:
    """Sends the loaded fraction, a few dozen times in all."""

    def __init__(self, connection: FrameSocket) -> None:
        self._connection = connection
        self._reported = -1.0

    def __call__(self, fraction: float) -> None:
        if fraction - self._reported >= LOAD_REPORT_FRACTION or fraction == 1.0 > self._reported:
            self._reported = fraction
            self._connection.send(EngineFrame(load_fraction=fraction))


def serve(engine: Engine, connection: FrameSocket) -> None:
    """Inbox, step, outbox, until the gateway requests a shutdown. Raises `PeerClosed` if it disconnects without one."""
    progress_due_s = 0.0
    while True:
        events: list[TokenEvent] = []
        bodies = connection.receive(0.0 if engine.has_requests else STATUS_INTERVAL_S)
        answers = [_apply_frame(engine, body, events) for body in bodies]
        if not bodies:
            engine.check_when_idle()
        if any(answers):
            connection.send(EngineFrame(events=events + engine.abort_all(), status=engine.status()))
            connection.drain(DRAIN_TIMEOUT_S)
            return
        step_events = engine.step_in_columns()
        now_s = time.monotonic()
        with_requests = now_s >= progress_due_s
        if with_requests:
            progress_due_s = now_s + PROGRESS_INTERVAL_S
        status = engine.status(with_requests=with_requests)
        connection.send(EngineFrame(events=events + step_events.others, decoded=step_events.decoded, status=status))


def _apply_frame(engine: Engine, body: bytes, events: list[TokenEvent]) -> bool:
    """Apply one frame of the gateway. Returns whether it requests a shutdown."""
    frame = decode_gateway_frame(body)
    for submitted in frame.submit:
        events += engine.submit(submitted)
    for request_id in frame.abort:
        events += engine.abort(request_id)
    for request_id, index in frame.abort_answers:
        events += engine.abort_answer(request_id, index)
    return frame.shutdown


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="engine.main", description="One engine process of Gatehouse.", allow_abbrev=False)
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket to the gateway")
    parser.add_argument("--options", type=json.loads, required=True, help="JSON object: options of engine.options by name")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser.parse_args(arguments)


def _engine_options(options: argparse.Namespace) -> EngineOptions:
    return EngineOptions.of({"inter_token_target_ms": INTER_TOKEN_TARGET_MS, **options.options})


if __name__ == "__main__":
    sys.exit(main())
