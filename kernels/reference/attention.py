"""Paged attention and the cache write, one query, one head, one key at a time, in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention_rows import AttentionRow, AttentionShape


def write_kv(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """kv: [T, 2K, D] (keys, then values), kv_cache: [N, P, 2, K, D], slot_mapping: [T] int64; writes in place."""
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        for head in range(num_kv_heads):
            kv_cache[slot // block_size, slot % block_size, 0, head] = kv[token, head]
            kv_cache[slot // block_size, slot % block_size, 1, head] = kv[token, num_kv_heads + head]


def paged_attention(
    qkv: torch.Tensor, kv_cache: torch.Tensor, rows: Sequence[AttentionRow], shape: AttentionShape
) -> torch.Tensor:
    """qkv: [T, H+2K, D] rotated, kv_cache: [N, P, 2, K, D] already written → [T, H, D]"""
    out = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype)
    token = 0
    for row in rows:
        for position in range(row.start, row.context_len):
            for head in range(shape.num_heads):
                out[token, head] = _attend(qkv[token, head].float(), kv_cache, row, shape, position, head).to(qkv.dtype)
            token += 1
    return out


def _attend(
    query: torch.Tensor, kv_cache: torch.Tensor, row: AttentionRow, shape: AttentionShape, position: int, head: int
) -> torch.Tensor:
    """One query head over the tokens it may see: [D]"""
    kv_head = head // (shape.num_heads // shape.num_kv_heads)
    first = 0 if shape.sliding_window is None else max(0, position + 1 - shape.sliding_window)
    end = position + 1 if shape.causal else row.context_len
    seen = [(row.block_table[p // shape.block_size], p % shape.block_size) for p in range(first, end)]
    keys = torch.stack([kv_cache[block, offset, 0, kv_head].float() for block, offset in seen])
    values = torch.stack([kv_cache[block, offset, 1, kv_head].float() for block, offset in seen])
    scores = (keys @ query) * (shape.head_dim**-0.5 if shape.scale is None else shape.scale)
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return torch.softmax(scores, dim=0) @ values
