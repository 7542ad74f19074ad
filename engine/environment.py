"""What a process sets before it imports torch, and how many threads it should use. No torch.

MKL        picks slow paths for small matrices on AMD processors unless told to stay with AVX2. With AVX2 its results also
           repeat from run to run.
OpenMP     lets a thread that waits for the others of a parallel section spin, by default for milliseconds. Meanwhile the
           gateway and whatever else shares the cores waits, at times even the thread that the others wait for.
C library  returns blocks of some megabytes as soon as a tensor is freed, and requests them again a layer later; the system
           clears every page of them each time.
Triton     fuses products and sums to one rounding unless a kernel says that it must not (`kernels.triton.sampling.gumbel`).
           That is its default today and will not be from 3.10 on; what tests compile is compiled so (`kernels.triton.gate`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

from engine import cgroup

log = logging.getLogger("gatehouse.engine")

FP_FUSION = "TRITON_DEFAULT_FP_FUSION"

SPINS = 10_000
"""Iterations that a waiting thread spins before it sleeps: some 100 µs, longer than a part of a decode step."""

KEPT_BYTES = 64 << 20
"""Free memory that stays with the process: what the tensors of a step with prompts take, except with the largest models."""

LARGEST_KEPT_BYTES = 32 << 20
"""Tensors from this size on are returned all the same; the C library accepts no larger threshold."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt


def prepare_environment() -> None:
    """Set what is described above, unless the operator has. Logs the variables that come too late because torch was imported
    before."""
    configure_malloc()
    os.environ.setdefault(FP_FUSION, "1")
    settings: dict[str, str] = {}
    if "GOMP_SPINCOUNT" not in os.environ and "OMP_WAIT_POLICY" not in os.environ:
        settings["GOMP_SPINCOUNT"] = str(SPINS)
    if "MKL_CBWR" not in os.environ and _is_amd():
        settings["MKL_CBWR"] = "AVX2"
    if settings and "torch" in sys.modules:
        unset = ", ".join(f"{name}={value}" for name, value in settings.items())
        log.info("torch was imported before the engine: %s not set, small batches may be slower", unset)
        return
    os.environ.update(settings)


def configure_malloc() -> None:
    """Have the C library keep what steps free, if it is glibc and the operator has not configured its allocator."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


def default_threads() -> int:
    """One core is left to the gateway and other processes. Parallel sections end in a barrier: with a busy neighbour on one of
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
