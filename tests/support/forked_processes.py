"""Starts programs in processes that have already imported their module: imports take longer than most of these programs.

They are forked by Python's fork server, which has only imported the program's module: within one test process, that of the
first program started.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from signal import Signals
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CONTEXT = multiprocessing.get_context("forkserver")


def start(module: str, function: str, *arguments: Any, log: Path | None = None) -> BaseProcess:
    """Run `module.function(*arguments)` in a new process, which passes the result to `sys.exit`; its output goes to `log`. Of
    per-process resources, only sockets and pipe ends may be arguments."""
    CONTEXT.set_forkserver_preload([module])
    process = ForkServerProcess(target=_run_function, args=(module, function, arguments, str(log or os.devnull)), daemon=True)
    process.start()
    return process


def send_signal(process: BaseProcess, number: Signals) -> None:
    """Send a signal to `process`."""
    assert process.pid is not None
    os.kill(process.pid, number)


def wait_for_exit(process: BaseProcess, deadline_s: float) -> int:
    """Wait for `process` to end and return its exit status; fail after `deadline_s`."""
    process.join(deadline_s)
    assert process.exitcode is not None, f"it has not ended within {deadline_s} s"
    return process.exitcode


def _run_function(module: str, function: str, arguments: tuple[Any, ...], log: str) -> None:
    gc.freeze()  # imported objects need no garbage collection
    for name in [name for name in os.environ if name.startswith("GATEHOUSE_")]:
        del os.environ[name]
    os.chdir(REPOSITORY)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    program: Callable[..., int | None] = getattr(import_module(module), function)
    sys.exit(program(*arguments))


@atexit.register
def _stop_server() -> None:
    """Wait for the fork server, so that its resource use counts as its parent's."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
