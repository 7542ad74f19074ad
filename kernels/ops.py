"""The only import surface of the kernels: every operation the engine's layers call, bound to one implementation.

The binding happens once, here, and `implementation` names it for the log and for `EngineInfo`. There is no fallback from
one implementation to another: this version has torch operations only, on every device.
"""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.cpu.attention import AttentionPlan, AttentionPlanner, paged_attention, write_kv
from kernels.cpu.elementwise import gelu, gelu_tanh, gelu_tanh_mul, layer_norm, rms_norm, rope, silu_mul
from kernels.cpu.experts import mix_experts, route
from kernels.cpu.linear import LinearKernel, can_pack, pack_linear

__all__ = [
    "AttentionPlan",
    "AttentionPlanner",
    "AttentionRow",
    "AttentionShape",
    "LinearKernel",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_mul",
    "implementation",
    "layer_norm",
    "mix_experts",
    "pack_linear",
    "paged_attention",
    "rms_norm",
    "rope",
    "route",
    "silu_mul",
    "write_kv",
]


def implementation(dtype: torch.dtype, device: torch.device) -> str:
    """Which kernels run for tensors of this kind, in words."""
    return f"torch operations ({device.type}{', oneDNN packed weights' if can_pack(dtype, device) else ''})"
