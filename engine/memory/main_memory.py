"""Main memory of this machine, and whether a host tier fits into it. Knows no torch."""

from __future__ import annotations

import os

from engine import cgroup
from engine.errors import EngineConfigError
from engine.memory.needs import GIB
from engine.options import EngineOptions

SWAP_SPACE_SHARE_MAX = 0.8


def main_memory_bytes() -> int:
    """Memory of the machine, or of the container, whose processes are killed if they exceed it."""
    machine_bytes, limit_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), cgroup.memory_bytes()
    return machine_bytes if limit_bytes is None else min(machine_bytes, limit_bytes)


def check_swap_space(options: EngineOptions, device_type: str) -> None:
    """Raise `EngineConfigError` for a host tier that main memory cannot hold. Beside a GPU it is page-locked, of which
    torch takes the next power of two."""
    memory, wanted = main_memory_bytes(), int(options.swap_space * GIB)
    needed_bytes = 1 << (wanted - 1).bit_length() if wanted and device_type == "cuda" else wanted
    if needed_bytes > memory * SWAP_SPACE_SHARE_MAX:
        rounded = f", page-locked as {needed_bytes / GIB:g} GiB," if needed_bytes > wanted else ""
        raise EngineConfigError(
            "swap_space",
            f"({options.swap_space:g} GiB){rounded} is more than {SWAP_SPACE_SHARE_MAX:.0%} of main memory "
            f"({memory / GIB:.1f} GiB)",
        )
