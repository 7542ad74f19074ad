"""Variables of the environment that turn a part of the engine off, to tell whether a fault is in it: 1 or 0. Knows no torch.

Kernels read theirs themselves, as they know no engine; all are looked at here before anything is loaded.
"""

from __future__ import annotations

import os

from engine.errors import EngineConfigError

GRAPHS, EARLY_LAUNCH, OVERLAPPED_PREFILL = "GATEHOUSE_GRAPHS", "GATEHOUSE_EARLY_LAUNCH", "GATEHOUSE_OVERLAPPED_PREFILL"


def check_switches() -> None:
    """Raise `EngineConfigError`, naming the variable, where one says neither on nor off."""
    for name in (GRAPHS, EARLY_LAUNCH, OVERLAPPED_PREFILL):
        is_on(name)


def is_on(name: str) -> bool:
    """Whether a part is used, as it is unless its variable says 0."""
    said = os.environ.get(name, "1")
    if said not in ("0", "1"):
        raise EngineConfigError(name, f"is {said!r}, and can be 0 or 1")
    return said == "1"
