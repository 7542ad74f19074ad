"""The operations in plain torch, for CPUs."""

from __future__ import annotations

from kernels.cpu.activation import gelu_tanh_mul, silu_mul
from kernels.cpu.bitmask import apply_bitmask
from kernels.cpu.blocks import copy_blocks, gather_blocks, scatter_blocks
from kernels.cpu.decode_inputs import advance_slots, prepare_decode
from kernels.cpu.drafts import reject_drafts
from kernels.cpu.embedding import embed, rotation_rows
from kernels.cpu.experts import mix_experts, route
from kernels.cpu.linear import pack_linear
from kernels.cpu.logits import cap_logits
from kernels.cpu.logprobs import token_logprobs
from kernels.cpu.norm import add_rms_norm, rms_norm
from kernels.cpu.paged_attention import paged_decode, paged_prefill
from kernels.cpu.rope_and_cache import rope_and_cache
from kernels.cpu.sampling import sample
from kernels.cpu.token_counts import count_tokens
from kernels.operations import Operations

OPERATIONS = Operations(
    description="torch operations",
    embed=embed,
    rotation_rows=rotation_rows,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope_and_cache=rope_and_cache,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    route=route,
    mix_experts=mix_experts,
    pack_linear=pack_linear,
    paged_decode=paged_decode,
    paged_prefill=paged_prefill,
    prepare_decode=prepare_decode,
    advance_slots=advance_slots,
    sample=sample,
    apply_bitmask=apply_bitmask,
    count_tokens=count_tokens,
    cap_logits=cap_logits,
    token_logprobs=token_logprobs,
    reject_drafts=reject_drafts,
    copy_blocks=copy_blocks,
    gather_blocks=gather_blocks,
    scatter_blocks=scatter_blocks,
    supports_paged=lambda _shape, _kv_dtype: False,  # gathered rows and torch's fused attention are faster
)
