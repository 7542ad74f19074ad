"""Environment variables, 1 or 0, that turn a part of the engine off, to find out whether it causes a fault. Knows no torch.

Kernels read theirs themselves, because they do not import the engine; all are checked here before anything is loaded. The
appliance has settings of the same names.
"""

from __future__ import annotations

import logging
import os

from engine.errors import EngineConfigError

GRAPHS, EARLY_LAUNCH, OVERLAPPED_PREFILL = "GATEHOUSE_GRAPHS", "GATEHOUSE_EARLY_LAUNCH", "GATEHOUSE_OVERLAPPED_PREFILL"
BUSY_WAIT, MEASURED_KERNELS = "GATEHOUSE_BUSY_WAIT", "GATEHOUSE_MEASURED_KERNELS"
SWITCHES = (GRAPHS, EARLY_LAUNCH, OVERLAPPED_PREFILL, BUSY_WAIT, MEASURED_KERNELS)

log = logging.getLogger("gatehouse.engine")


def check_switches() -> None:
    """Log what is off. Raises `EngineConfigError`, naming the variable, where one is neither 0 nor 1."""
    off = switched_off()
    if off:
        log.warning("switched off, which makes an engine on a GPU slower: %s", ", ".join(f"{name}=0" for name in off))


def switched_off() -> list[str]:
    """The variables that are 0. Raises like `check_switches`."""
    return [name for name in SWITCHES if not is_on(name)]


def is_on(name: str) -> bool:
    """Whether a part is on: unless its variable is 0."""
    value = os.environ.get(name, "1")
    if value not in ("0", "1"):
        raise EngineConfigError(name, f"is {value!r}, and can be 0 or 1")
    return value == "1"
