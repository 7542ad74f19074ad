"""Ends a process of a bench with its parent. Standard library only: peers' interpreters import it too."""

from __future__ import annotations

import ctypes
import signal

PR_SET_PDEATHSIG = 1
"""Constant of Linux's prctl(2): the signal that a process gets when its parent ends."""


def end_with_parent() -> None:
    """Have this process killed when its parent ends, however that ends. Does nothing on systems other than Linux."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
