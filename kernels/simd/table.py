"""The operations in vectors of this processor, for float32 on CPUs; torch's where there is no kernel here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kernels.attention_rows import AttentionShape
from kernels.simd.activation import gelu_tanh_mul, silu_mul
from kernels.simd.attention import can_attend, paged_decode, paged_prefill
from kernels.simd.decode_inputs import advance_slots, prepare_decode
from kernels.simd.embedding import embed, rotation_rows
from kernels.simd.launching import OperationSequence
from kernels.simd.linear import pack_linear
from kernels.simd.logits import cap_logits
from kernels.simd.norm import add_rms_norm, rms_norm
from kernels.simd.rope_and_cache import rope_and_cache
from kernels.simd.sampling import sample, sampling_workspace
from kernels.simd.scores import score_tokens
from kernels.simd.threads import pool
from kernels.simd.token_counts import count_tokens
from kernels.simd.vectors import LANES
from kernels.torch import table as plain


def _rope_and_cache(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, kv_cache: torch.Tensor | None, slot_mapping: torch.Tensor,
    *, kv_scales: torch.Tensor | None = None, **others: Any,
) -> None:  # fmt: skip
    """As `kernels.torch.rope_and_cache`, which handles caches in other formats."""
    if kv_cache is None or kv_cache.dtype is torch.float32:
        rope_and_cache(qkv, cos, sin, kv_cache, slot_mapping, **others)
    else:
        plain.OPERATIONS.rope_and_cache(qkv, cos, sin, kv_cache, slot_mapping, kv_scales=kv_scales, **others)


def _supports_paged(shape: AttentionShape, kv_dtype: torch.dtype) -> bool:
    return kv_dtype is torch.float32 and can_attend(shape)


def _paged_decode(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor, shape: AttentionShape,
    **others: Any,
) -> torch.Tensor:  # fmt: skip
    """As `kernels.torch.paged_attention`, which handles caches in other formats and unusual heads."""
    attend = paged_decode if _supports_paged(shape, kv_cache.dtype) else plain.OPERATIONS.paged_decode
    return attend(q, kv_cache, block_tables, context_lens, shape, **others)


def _paged_prefill(
    q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, query_starts: torch.Tensor,
    context_lens: torch.Tensor, shape: AttentionShape, **others: Any,
) -> torch.Tensor:  # fmt: skip
    attend = paged_prefill if _supports_paged(shape, kv_cache.dtype) else plain.OPERATIONS.paged_prefill
    return attend(q, kv_cache, block_tables, query_starts, context_lens, shape, **others)


OPERATIONS = replace(
    plain.OPERATIONS,
    description=f"Numba kernels, {LANES} float32 lanes, " + ("torch's threads" if pool().address else "one thread"),
    embed=embed,
    rotation_rows=rotation_rows,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope_and_cache=_rope_and_cache,
    silu_mul=silu_mul,
    gelu_tanh_mul=gelu_tanh_mul,
    pack_linear=pack_linear,
    paged_decode=_paged_decode,
    paged_prefill=_paged_prefill,
    prepare_decode=prepare_decode,
    advance_slots=advance_slots,
    sample=sample,
    sampling_workspace=sampling_workspace,
    count_tokens=count_tokens,
    supports_paged=_supports_paged,
    is_row_invariant=True,
    sequence=OperationSequence,
    score_tokens=score_tokens,
    cap_logits=cap_logits,
)
