"""What the process should know of its processor: settings before torch is imported, and how many threads to use. No torch.

MKL picks slow paths for small matrices on AMD processors unless told to stay with AVX2, and its results then also repeat
from run to run. And a thread that waits for the others of a parallel section does so at full speed, by default for
milliseconds: the gateway and whoever else shares the cores waits meanwhile, at times the very thread that is waited for. And
the C library gives memory of some megabytes back as soon as a tensor is gone, to ask for it again a layer later: then the
system clears every page of it anew.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

from engine import cgroup

log = logging.getLogger("gatehouse.engine")

SPINS = 10_000
"""Turns that a waiting thread takes before it sleeps: some 100 µs, longer than a part of a decode step."""


KEPT_BYTES = 64 << 20
"""Free memory that stays with the process: what the tensors of a step with prompts take, but for the largest models."""

LARGEST_KEPT_BYTES = 32 << 20
"""Tensors from this size on are given back all the same; the C library takes no larger number."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def prepare_cpu() -> None:
    """Set what helps on this processor; what the operator has set himself stays. Says so when it comes too late."""
    keep_memory()
    settings: dict[str, str] = {}
    if "GOMP_SPINCOUNT" not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        settings["GOMP_SPINCOUNT"] = str(SPINS)
    if "MKL_CBWR" not in os.environ and _is_amd():
        settings["MKL_CBWR"] = "AVX2"
    if settings and "torch" in sys.modules:
        told = ", ".join(f"{name}={value}" for name, value in settings.items())
        log.info("torch was imported before the engine: %s not set, small batches may be slower", told)
        return
    os.environ.update(settings)


def keep_memory() -> None:
    """Have the C library keep what steps free, if it is glibc and the operator has said nothing about it."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def default_threads() -> int:
    """One core is left to the gateway and everybody else. Parallel sections end in a barrier: with a busy neighbour on one of
    two cores, two threads were measured 10 to 20 times slower than one (bench/engine_cpu.py's model, 16 requests)."""
    return max(1, num_cores() - 1)


def num_cores() -> int:
    """Cores that this process may use, whole ones: those it may run on, and no more than the quota of its container. With more
    threads the system stops all of them for the rest of each tenth of a second."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup.cores()
    return usable if quota is None else max(1, min(usable, int(quota)))


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
