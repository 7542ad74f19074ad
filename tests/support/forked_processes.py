"""Programs as processes of their own that begin with everything imported: to import takes longer than most of what they do.

They are forked, by the server that Python has for it, from a process that has done nothing but import the program's module:
in one process of tests, that of the first program that is begun.
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
    """Begin `module.function(*arguments)` in a process whose status is what that returns, as of `sys.exit`; it says into `log`
    what it says. Sockets and ends of pipes may be among the arguments, nothing else that only one process has."""
    CONTEXT.set_forkserver_preload([module])
    process = ForkServerProcess(target=_run_function, args=(module, function, arguments, str(log or os.devnull)), daemon=True)
    process.start()
    return process


def send_signal(process: BaseProcess, number: Signals) -> None:
    """Send a signal to `process`."""
    assert process.pid is not None
    os.kill(process.pid, number)


def wait_for_exit(process: BaseProcess, deadline_s: float) -> int:
    """Return the status of `process` when it has ended; fail when it has not in time."""
    process.join(deadline_s)
    assert process.exitcode is not None, f"it has not ended within {deadline_s} s"
    return process.exitcode


def _run_function(module: str, function: str, arguments: tuple[Any, ...], log: str) -> None:
    gc.freeze()  # what was imported, which no collection has to look at
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
    """Wait for the server, so that what it took is counted as what its parent took."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
