"""A decode's rotation, its write to the cache and its attention in one launch: one fewer in every layer of a step of few rows,
two fewer of one row (`lone_decode`).

The projection is rotated where it is attended (`newest_token`), by the kernel of attention_decode.py.
"""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionShape
from kernels.triton.attention_decode import check_attention, launch_decode
from kernels.triton.attention_splits import DecodeWorkspace
from kernels.triton.lone_decode import lone_decode
from kernels.triton.newest_token import Rotation


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
    """`rope_and_cache`, then `paged_decode` of the newest token of each request, in one launch (and the merge): [B, H, D]

    qkv: [B, H+2K, D], rows may lie apart, stays as it is; cos, sin, slot_mapping, weights of QK-norm ([D] alone), eps and
    rotary_dim as `rope_and_cache` takes them, everything else as `paged_decode` does, each request having one row. Sources,
    operations and rounding are theirs; the newest token is attended before those in the cache, of one row alone behind them.
    Bytes: theirs without writing queries and reading them again. Each program rotates the queries of its split; the one of a
    request's last split writes.
    """
    check_attention(qkv[:, : shape.num_heads], kv_cache, shape)
    out = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    rotation = Rotation(cos, sin, slot_mapping, q_weight, k_weight, eps, rotary_dim)
    if qkv.shape[0] == 1:
        lone_decode(qkv, rotation, kv_cache, block_tables, context_lens, shape, out, kv_scales=kv_scales)
        return out
    launch_decode(qkv, kv_cache, block_tables, context_lens, shape, out, workspace, kv_scales=kv_scales, rotation=rotation)
    return out
