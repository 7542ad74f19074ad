"""A process of the bench: `python -m bench.gpu.part NAME…`. Imports first, waits for a line of facts, then measures.

Lines of JSON go to what was standard output; everything that libraries print goes to standard error, with what the engine logs:
starts, captures, fall-backs. A part that is about to be ended says where it stands: a card that hangs says nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, TextIO

from bench.gpu import requirements
from bench.gpu.plan import BY_NAME

log = logging.getLogger("gatehouse.bench")

LAST_WORDS_S = 2.0
"""So long before its end a part tells where each of its threads is."""
HUNG_S = 1.0
"""After so long without that, the main thread runs no Python any more, and the watchdog tells."""
PR_SET_PDEATHSIG = 1
"""Of Linux' prctl(2)."""
BEHIND = 10
"""How much nicer a part is that gives no rows than those beside it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=sorted(BY_NAME))
    parser.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    _give_way(options.names)
    answers = _own_output()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    requirements.check(rehearse=options.rehearse)
    import torch

    from bench.gpu.context import Context

    if options.rehearse:
        _prepare_interpreter()
    modules = [importlib.import_module(BY_NAME[name].module) for name in options.names]
    functions = [getattr(module, BY_NAME[name].function) for module, name in zip(modules, options.names, strict=True)]
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans for every length anew; the row that measures it names it
    for module in modules:
        _import_libraries(getattr(module, "LIBRARIES", ()))

    def write(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    write({"ready": options.names})
    told = json.loads(sys.stdin.readline() or "null")
    if told is None:
        return
    facts, until_s = told["facts"], float(told["until_s"])  # by the clock that the processes of a machine share
    _tell_where_it_stands(max(0.01, until_s - LAST_WORDS_S - time.monotonic()))
    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("torch finds no NVIDIA GPU here; `bench/gpu.sh --rehearse` tries the program without one")
    device = torch.device("cpu" if options.rehearse else "cuda")
    context = Context(device, options.rehearse, facts, write, until_s)
    for name, function in zip(options.names, functions, strict=True):
        log.info("begins part=%s left_s=%.0f", name, context.left_s)
        torch.manual_seed(0)
        function(context)
    signal.setitimer(signal.ITIMER_REAL, 0)
    faulthandler.cancel_dump_traceback_later()
    write({"done": options.names})
    logging.shutdown()
    os._exit(0)  # what libraries wait for at their end, compilers of theirs among it, takes ten seconds of the run


def end_with_parent() -> None:
    """A run that is killed leaves nobody on the card, whose memory and time the next one needs."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _give_way(names: Sequence[str]) -> None:
    """What only warms up compiles with as many threads as there are cores, a check with one: the check goes first."""
    if all(BY_NAME[name].target == "warm-up" for name in names):
        os.nice(BEHIND)


def _tell_where_it_stands(in_s: float) -> None:
    """A thread that looks at the others while they work may end the process (CPython, issue 116008), as it did on an H200 to a
    part that had two seconds left. So the main thread tells, when it holds Python's lock; the other one does where it hangs."""

    def tell(*_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        faulthandler.dump_traceback()

    signal.signal(signal.SIGALRM, tell)
    signal.setitimer(signal.ITIMER_REAL, in_s)
    faulthandler.dump_traceback_later(in_s + HUNG_S)


def _prepare_interpreter() -> None:
    """The interpreter rounds to e4m3 as no card does, and takes most of its time for what nobody sees; the tests know how to
    put both right."""
    import pytest

    from tests.support.interpreted_fp8 import correct_e4m3
    from tests.support.quick_interpreter import replace_language_once

    replace_language_once()
    correct_e4m3(pytest.MonkeyPatch())


def _import_libraries(names: Sequence[str]) -> None:
    """Of peers, which take seconds: before the part's time begins. Its rows say what is wrong with one that is not there."""
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, RuntimeError) as error:  # transformers raises both
            log.warning("not imported library=%s reason=%s", name, error)


def _own_output() -> TextIO:
    """Standard output for rows alone."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept


if __name__ == "__main__":
    end_with_parent()
    main()
