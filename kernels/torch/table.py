"""The operations in plain torch: those of a CPU for all types but float32."""

from __future__ import annotations

from kernels.operations import Operations
from kernels.torch.activation import gelu_tanh_mul, silu_mul
from kernels.torch.bitmask import apply_bitmask
from kernels.torch.blocks import copy_blocks, gather_blocks, scatter_blocks
from kernels.torch.decode_inputs import advance_slots, prepare_decode
from kernels.torch.drafts import reject_drafts
from kernels.torch.embedding import embed, rotation_rows
from kernels.torch.experts import mix_experts, route
from kernels.torch.linear import pack_linear
from kernels.torch.logits import cap_logits
from kernels.torch.logprobs import token_logprobs
from kernels.torch.norm import add_rms_norm, rms_norm
from kernels.torch.paged_attention import paged_decode, paged_prefill
from kernels.torch.rope_and_cache import rope_and_cache
from kernels.torch.sampling import sample
from kernels.torch.token_counts import count_tokens

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
