"""The operations on NVIDIA GPUs, as Triton kernels. Imported by `kernels.ops` when such a device is first used.

Torch's own kernels serve layer normalisation and the plain GELUs of encoders, and `route` and `mix_experts`, for mixtures that
`bind_experts` cannot read. These two synchronise with the host in each layer, which an engine reports when it starts. The host
uses the chosen experts as indices, so passes that only request kernels must get experts that exist.
"""

from __future__ import annotations

from kernels.operations import Operations
from kernels.torch.experts import mix_experts, route
from kernels.torch.logits import cap_logits
from kernels.triton.attention.decode import paged_decode
from kernels.triton.attention.prefill import paged_prefill
from kernels.triton.attention.rope_and_cache import rope_and_cache
from kernels.triton.attention.rotated_decode import rotated_decode
from kernels.triton.attention.splits import decode_workspace, max_verify_group
from kernels.triton.experts.mixture import bind_experts
from kernels.triton.experts.router import route_live
from kernels.triton.products.fused_linear import linear_add, normed_linear
from kernels.triton.products.linear import PlainLinear
from kernels.triton.rows.activation import gelu_tanh_mul, gelu_tanh_mul_fp8, silu_mul, silu_mul_fp8
from kernels.triton.rows.norm import add_rms_norm, add_rms_norm_fp8, rms_norm, rms_norm_fp8
from kernels.triton.sampling.bitmask import apply_bitmask
from kernels.triton.sampling.drafts import reject_drafts
from kernels.triton.sampling.greedy_head import bind_greedy_head
from kernels.triton.sampling.logprobs import token_logprobs
from kernels.triton.sampling.sampler import sample, sampling_workspace
from kernels.triton.sampling.token_counts import count_tokens
from kernels.triton.step.blocks import copy_blocks, gather_blocks, scatter_blocks
from kernels.triton.step.embedding import embed, rotation_rows
from kernels.triton.step.inputs import advance_slots, prepare_decode

OPERATIONS = Operations(
    description="Triton kernels, large products by cuBLAS",
    embed=embed,
    rotation_rows=rotation_rows,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope_and_cache=rope_and_cache,
    rms_norm_fp8=rms_norm_fp8,
    add_rms_norm_fp8=add_rms_norm_fp8,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    silu_mul_fp8=silu_mul_fp8,
    gelu_tanh_mul_fp8=gelu_tanh_mul_fp8,
    route=route,
    route_live=route_live,
    mix_experts=mix_experts,
    bind_experts=bind_experts,
    pack_linear=PlainLinear,
    linear_add=linear_add,
    normed_linear=normed_linear,
    paged_decode=paged_decode,
    rotated_decode=rotated_decode,
    paged_prefill=paged_prefill,
    decode_workspace=decode_workspace,
    max_verify_group=max_verify_group,
    prepare_decode=prepare_decode,
    advance_slots=advance_slots,
    sample=sample,
    sampling_workspace=sampling_workspace,
    apply_bitmask=apply_bitmask,
    count_tokens=count_tokens,
    cap_logits=cap_logits,
    token_logprobs=token_logprobs,
    reject_drafts=reject_drafts,
    bind_greedy_head=bind_greedy_head,
    copy_blocks=copy_blocks,
    gather_blocks=gather_blocks,
    scatter_blocks=scatter_blocks,
)
