"""A decode's rotation, cache write and attention in one launch: one launch fewer per layer in a step of few rows, two fewer
with one row (`lone_decode`).

The projection is rotated inside the attention kernel (`newest_token`), that of decode.py. Where an engine has found
the launches of rotation and attention one after the other to be faster on its card, those serve (`kernels.alternatives`).
"""

from __future__ import annotations

import torch

from kernels.alternatives import (
    FEW_ROWS_ATTENTION,
    LONE_ATTENTION,
    ONE_LAUNCH,
    ROTATION_BEFORE,
    ROTATION_INSIDE,
    SPLITS,
)
from kernels.attention_rows import AttentionShape
from kernels.triton.attention.decode import check_attention, launch_decode
from kernels.triton.attention.lone_decode import lone_decode
from kernels.triton.attention.newest_token import Rotation
from kernels.triton.attention.rope_and_cache import rope_and_cache
from kernels.triton.attention.splits import DecodeWorkspace


def rotated_decode(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    rotary_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """`rope_and_cache`, then `paged_decode` of each request's newest token, in one launch (and the merge): [B, H, D]

    qkv: [B, H+2K, D], rows need not be contiguous, may be changed; cos, sin, slot_mapping, weights of QK-norm (only [D]), eps
    and rotary_dim as in `rope_and_cache`, everything else as in `paged_decode`, with one row per request. Sources, operations
    and rounding are those of the two; the newest token is attended to before the cached ones, or after them with a single row.
    Bytes: those of the two, without writing queries and reading them again. Each program rotates the queries of its split; the
    program of a request's last split writes to the cache.
    """
    queries = qkv[:, : shape.num_heads]
    check_attention(queries, kv_cache, shape)
    out = torch.empty(queries.shape, dtype=qkv.dtype, device=qkv.device)
    rotation = Rotation(cos, sin, slot_mapping, q_weight, k_weight, eps, rotary_dim)
    if qkv.shape[0] == 1:
        serving = LONE_ATTENTION.serving(ONE_LAUNCH, SPLITS, ROTATION_BEFORE)
    else:
        serving = FEW_ROWS_ATTENTION.serving(ROTATION_INSIDE, ROTATION_BEFORE)
    if serving == ONE_LAUNCH:
        lone_decode(qkv, rotation, kv_cache, block_tables, context_lens, shape, out, kv_scales=kv_scales)
    elif serving == ROTATION_BEFORE:
        rope_and_cache(
            qkv, cos, sin, kv_cache, slot_mapping, num_kv_heads=shape.num_kv_heads, rotary_dim=rotary_dim,
            q_weight=q_weight, k_weight=k_weight, eps=eps, kv_scales=kv_scales,
        )  # fmt: skip
        launch_decode(queries, kv_cache, block_tables, context_lens, shape, out, workspace, kv_scales=kv_scales)
    else:
        launch_decode(qkv, kv_cache, block_tables, context_lens, shape, out, workspace, kv_scales=kv_scales, rotation=rotation)
    return out
