"""What the process should know of its processor: settings before torch is imported, and how many threads to use. No torch.

MKL picks slow paths for small matrices on AMD processors unless told to stay with AVX2, and its results then also repeat
from run to run.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

log = logging.getLogger("gatehouse.engine")


def prepare_cpu() -> None:
    """Set what helps on this processor; what the operator has set himself stays. Says so when it comes too late."""
    if "MKL_CBWR" in os.environ or not _is_amd():
        return
    if "torch" in sys.modules:
        log.info("torch was imported before the engine: MKL_CBWR=AVX2 is not set, small batches may be slower")
        return
    os.environ["MKL_CBWR"] = "AVX2"


def default_threads() -> int:
    """One core is left to the gateway and everybody else. Parallel sections end in a barrier: with a busy neighbour on one of
    two cores, two threads were measured 10 to 20 times slower than one (bench/engine_cpu.py's model, 16 requests)."""
    return max(1, num_cores() - 1)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
