"""The only import surface of the kernels: every operation the engine's layers call, bound to one implementation.

The binding happens once, here, and `implementation` names it for the log and for `EngineInfo`. There is no fallback from
one implementation to another: this version has torch operations only, on every device.
"""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.cpu.attention import AttentionPlan, AttentionPlanner, planned_attention, write_kv
from kernels.cpu.decoded_linear import linear_fp8, linear_int4, linear_int8
from kernels.cpu.elementwise import gelu, gelu_tanh, gelu_tanh_mul, layer_norm, rms_norm, rope, silu_mul
from kernels.cpu.experts import mix_experts, route
from kernels.cpu.fp8_rows import quantize_rows_fp8, to_fp8
from kernels.cpu.invariant_attention import InvariantPlan, InvariantPlanner, invariant_attention
from kernels.cpu.linear import LinearKernel, LinearPacker, can_pack, pack_linear
from kernels.cpu.row_tiles import pack_linear_row_invariant, row_invariant
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight, pack_awq, pack_fp8, pack_gptq, pack_int8

__all__ = [
    "AttentionPlan",
    "AttentionPlanner",
    "AttentionRow",
    "AttentionShape",
    "Fp8Weight",
    "Int4Weight",
    "Int8Weight",
    "InvariantPlan",
    "InvariantPlanner",
    "LinearKernel",
    "LinearPacker",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_mul",
    "implementation",
    "layer_norm",
    "linear_fp8",
    "linear_int4",
    "linear_int8",
    "mix_experts",
    "pack_awq",
    "pack_fp8",
    "pack_gptq",
    "pack_int8",
    "pack_linear",
    "pack_linear_row_invariant",
    "paged_attention",
    "quantize_rows_fp8",
    "rms_norm",
    "rope",
    "route",
    "row_invariant",
    "silu_mul",
    "to_fp8",
    "write_kv",
]


def paged_attention(qkv: torch.Tensor, kv_cache: torch.Tensor | None, plan: AttentionPlan | InvariantPlan) -> torch.Tensor:
    """qkv: [T, H+2K, D] rotated, kv_cache: [N, P, 2, K, D] already written, None for a plan of whole texts → [T, H, D]

    By the kind of the plan: as fast as can be, or with results that do not depend on the batch.
    """
    if isinstance(plan, AttentionPlan):
        return planned_attention(qkv, kv_cache, plan)
    assert kv_cache is not None, "batch-invariant attention reads the cache"
    return invariant_attention(qkv, kv_cache, plan)


def implementation(dtype: torch.dtype, device: torch.device, *, batch_invariant: bool = False) -> str:
    """Which kernels run for tensors of this kind, in words."""
    packed = ", oneDNN packed weights" if can_pack(dtype, device) else ""
    return f"torch operations ({device.type}{packed}{', batch-invariant' if batch_invariant else ''})"
