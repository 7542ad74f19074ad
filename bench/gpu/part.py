"""A process of the bench: `python -m bench.gpu.part NAME…`. It imports first, waits for a line of facts, then measures.

Lines of JSON go to the original standard output; everything that libraries print goes to standard error, as do the engine's log
lines: starts, captures, fallbacks. A part about to be killed prints its stack traces: a hung card leaves no other information.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn, TextIO

from bench.gpu import device_lost, requirements
from bench.gpu.plan import BY_NAME
from bench.parent import end_with_parent

log = logging.getLogger("gatehouse.bench")

STACK_DUMP_S = 2.0
"""How long before its end a part prints the stack of each of its threads."""
HUNG_S = 1.0
"""If the main thread has not printed them after this long, it no longer runs Python, and the watchdog prints them instead."""
WARM_UP_NICENESS = 10
"""Added niceness of a part that gives no rows, so that it yields to the parts that run alongside it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(BY_NAME))
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    _lower_priority(options.names)
    rows_out = _reserve_stdout()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    requirements.check(rehearse=options.rehearse)
    import torch

    from bench.gpu.context import Context

    if options.rehearse:
        _prepare_interpreter()
    modules = [importlib.import_module(BY_NAME[name].module) for name in options.names]
    functions = [getattr(module, BY_NAME[name].function) for module, name in zip(modules, options.names, strict=True)]
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length; its own row selects it explicitly
    for module in modules:
        _import_libraries(getattr(module, "LIBRARIES", ()))

    def write(line: dict[str, Any]) -> None:
        rows_out.write(json.dumps(line) + "\n")
        rows_out.flush()

    write({"ready": options.names})
    start = json.loads(sys.stdin.readline() or "null")
    if start is None:
        return
    facts, until_s = start["facts"], float(start["until_s"])  # on the monotonic clock, which all processes of a machine share
    _schedule_stack_dump(max(0.01, until_s - STACK_DUMP_S - time.monotonic()))
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("torch finds no NVIDIA GPU here; `bench/gpu.sh --rehearse` tries the program without one")
    device = torch.device("cpu" if options.rehearse else "cuda")
    context = Context(device, options.rehearse, facts, write, until_s, done=frozenset(start["done"]))
    for name, function in zip(options.names, functions, strict=True):
        log.info("begins part=%s left_s=%.0f", name, context.left_s)
        torch.manual_seed(0)
        try:
            function(context)
        except Exception as error:
            log.exception("failed part=%s", name)
            context.check_device(name, error)
            raise
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    write({"done": options.names})
    _exit(0)  # an orderly exit waits for libraries, their compilers included, and costs the run ten seconds


def _lower_priority(names: Sequence[str]) -> None:
    """Lower the priority of a warm-up part: it compiles with as many threads as there are cores, a check with one."""
    if all(BY_NAME[name].target == "warm-up" for name in names):
        os.nice(WARM_UP_NICENESS)


def _schedule_stack_dump(in_s: float) -> None:
    """Dumping the stacks of running threads from another thread may crash the process (CPython, issue 116008), as it did on an
    H200 to a part that had two seconds left. So the main thread does it, holding the GIL; the watchdog does only if that hangs.
    """

    def dump(*_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback()

    signal.signal(signal.SIGALRM, dump)
    signal.setitimer(signal.ITIMER_REAL, in_s)
    faulthandler.dump_traceback_later(in_s + HUNG_S)


def _prepare_interpreter() -> None:
    """Apply the tests' corrections of Triton's interpreter, which rounds to e4m3 as no card does and spends most of its time on
    work without visible effect."""
    import pytest

    from tests.support.interpreted_fp8 import correct_e4m3
    from tests.support.quick_interpreter import replace_language_once

    replace_language_once()
    correct_e4m3(pytest.MonkeyPatch())


def _import_libraries(names: Sequence[str]) -> None:
    """Import the peers' libraries, which takes seconds, before the part's time begins. Its rows report a missing library."""
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError) as error:  # transformers raises both
            log.warning("not imported library=%s reason=%s", name, error)


def _reserve_stdout() -> TextIO:
    """Reserve standard output for rows; anything else that is printed goes to standard error."""
    rows_out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return rows_out


def run_and_exit() -> NoReturn:
    """Run `main` and end the process at once, even after an error: on a lost card, torch (2.11) aborts the process as soon as
    Python frees page-locked memory, and its stack traces would hide the part's own error."""
    try:
        main()
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
        if isinstance(error, device_lost.DeviceLost):
            _exit(device_lost.STATUS)
        _exit(1 if isinstance(error.code, str) else error.code or 0)
    except BaseException:  # noqa: BLE001 - printed, and the process ends
        traceback.print_exc()
        _exit(1)
    _exit(0)


def _exit(status: int) -> NoReturn:
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    end_with_parent()  # so that a killed run leaves no process on the card: the next run needs its memory and time
    run_and_exit()
