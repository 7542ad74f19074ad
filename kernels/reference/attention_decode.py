"""Paged attention of the newest queries of each request, one query and one head at a time, in float64."""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionShape


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
    """q: [T, H, D], kv_cache: [N, P, 2, K, D], block_tables: [B, M], context_lens: [B] → [T, H, D]

    Request b's queries are rows query_starts[b] … query_starts[b + 1] - 1, row b alone without `query_starts`. The last one
    sees context_lens[b] tokens, itself included, each earlier one a token less. A query that sees nothing gets zeros.
    """
    attended = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts = list(range(len(context_lens) + 1)) if query_starts is None else query_starts.tolist()
    for request, context_len in enumerate(context_lens.tolist()):
        assert starts[request + 1] - starts[request] <= max_query_len, "more queries than announced"
        for row in range(starts[request], starts[request + 1]):
            seen = max(0, context_len - (starts[request + 1] - 1 - row))
            for head in range(shape.num_heads):
                attended[row, head] = attend(q[row, head], kv_cache, block_tables[request], seen, shape, head, kv_scales)
    return attended


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seen: int,
    shape: AttentionShape,
    head: int,
    kv_scales: torch.Tensor | None,
) -> torch.Tensor:
    """One query head, [D], over the first `seen` tokens of its request, or as many of them as its window holds: [D]"""
    kv_head = head // (shape.num_heads // shape.num_kv_heads)
    first = 0 if shape.sliding_window is None else max(0, seen - shape.sliding_window)
    if first == seen:
        return torch.zeros_like(query)
    places = torch.arange(first, seen, device=query.device)
    blocks = block_table[places // shape.block_size].long()
    found = kv_cache[blocks, places % shape.block_size, :, kv_head].double()  # [seen, 2, D]
    key_scale, value_scale = (1.0, 1.0) if kv_scales is None else kv_scales.double().tolist()
    keys, values = found[:, 0] * key_scale, found[:, 1] * value_scale
    scores = (keys @ query.double()) * (shape.head_dim**-0.5 if shape.scale is None else shape.scale)
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    return (torch.softmax(scores, dim=0) @ values).to(query.dtype)
