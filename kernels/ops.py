"""The only import surface of the kernels: every operation the engine's layers call, bound to one implementation.

The binding happens once, here, and `implementation` names it for the log and for `EngineInfo`. There is no fallback from
one implementation to another: this version has torch operations only, on every device.
"""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.cpu.attention import AttentionPlan, AttentionPlanner, paged_attention, write_kv
from kernels.cpu.elementwise import rms_norm, rope, silu_mul

__all__ = [
    "AttentionPlan",
    "AttentionPlanner",
    "AttentionRow",
    "AttentionShape",
    "implementation",
    "paged_attention",
    "rms_norm",
    "rope",
    "silu_mul",
    "write_kv",
]


def implementation(device: torch.device) -> str:
    """Which kernels run on `device`, in words."""
    return f"torch operations ({device.type})"
