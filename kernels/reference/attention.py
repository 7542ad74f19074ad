"""Paged attention and the cache write in float64: one query, one head and, for the cache write, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.attention_rows import AttentionRow, AttentionShape


def write_kv(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write keys and values to the cache, in place.

    kv: [T, 2K, D] (keys, then values), kv_cache: [N, P, 2, K, D], slot_mapping: [T] int64
    """
    block_size, num_kv_heads = kv_cache.shape[1], kv_cache.shape[3]
    for token, slot in enumerate(slot_mapping.tolist()):
        for head in range(num_kv_heads):
            kv_cache[slot // block_size, slot % block_size, 0, head] = kv[token, head]
            kv_cache[slot // block_size, slot % block_size, 1, head] = kv[token, num_kv_heads + head]


def paged_attention(
    qkv: torch.Tensor, kv_cache: torch.Tensor, rows: Sequence[AttentionRow], shape: AttentionShape
) -> torch.Tensor:
    """Attention of rows known to the host.

    qkv: [T, H+2K, D] rotated, kv_cache: [N, P, 2, K, D] already written → [T, H, D]; only this function allows shapes without
    `causal`.
    """
    out = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype)
    token = 0
    for row in rows:
        table = torch.tensor(row.block_table)
        for position in range(row.start, row.context_len):
            end = position + 1 if shape.causal else row.context_len
            first = 0 if shape.sliding_window is None else max(0, position + 1 - shape.sliding_window)
            for head in range(shape.num_heads):
                out[token, head] = _attend(qkv[token, head], kv_cache, table, range(first, end), shape, head, None)
            token += 1
    return out


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    query_starts: torch.Tensor | None = None,
    max_query_len: int = 1,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_prefill`; without `query_starts` row b is the only query of request b."""
    starts = torch.arange(len(context_lens) + 1) if query_starts is None else query_starts
    return paged_prefill(
        q, kv_cache, block_tables, starts, context_lens, shape, max_query_len=max_query_len, kv_scales=kv_scales, out=out
    )


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    max_query_len: int,
    any_lengths: bool = False,  # noqa: ARG001 - affects only speed
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of consecutive queries of each request.

    q: [T, H, D], kv_cache: [N, P, 2, K, D] already written, block_tables: [B, M], query_starts: [B + 1],
    context_lens: [B], kv_scales: [2] of keys and of values, None is one → [T, H, D]

    Request b's queries are rows query_starts[b] … query_starts[b + 1] - 1. The last one sees context_lens[b] tokens, itself
    included, each earlier one sees one token less. A query that sees nothing gets zeros.
    """
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts = query_starts.tolist()
    for request, context_len in enumerate(context_lens.tolist()):
        assert starts[request + 1] - starts[request] <= max_query_len, "more queries than announced"
        table = block_tables[request]
        for row in range(starts[request], starts[request + 1]):
            end = max(0, context_len - (starts[request + 1] - 1 - row))
            visible = range(0 if shape.sliding_window is None else max(0, end - shape.sliding_window), end)
            for head in range(shape.num_heads):
                result[row, head] = _attend(q[row, head], kv_cache, table, visible, shape, head, kv_scales)
    return result


def _attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    visible: range,
    shape: AttentionShape,
    head: int,
    kv_scales: torch.Tensor | None,
) -> torch.Tensor:
    """One query head, [D], over the tokens of its request that it sees: [D]"""
    if not visible:
        return torch.zeros_like(query)
    kv_head = head // (shape.num_heads // shape.num_kv_heads)
    positions = torch.arange(visible.start, visible.stop, device=query.device)
    blocks = block_table[positions // shape.block_size].long()
    slots = kv_cache[blocks, positions % shape.block_size, :, kv_head].double()  # [visible, 2, D]
    key_scale, value_scale = (1.0, 1.0) if kv_scales is None else kv_scales.double().unbind()
    keys, values = slots[:, 0] * key_scale, slots[:, 1] * value_scale
    scores = (keys @ query.double()) * (shape.head_dim**-0.5 if shape.scale is None else shape.scale)
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return (torch.softmax(scores, dim=0) @ values).to(query.dtype)
