"""Paged causal attention of chunks of prompts, one query and one head at a time, in float64."""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionShape
from kernels.reference.attention_decode import attend


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    max_query_len: int,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """q: [T, H, D], kv_cache: [N, P, 2, K, D] already written, block_tables: [B, M], query_starts: [B + 1],
    context_lens: [B] → [T, H, D]

    Request b's queries are rows query_starts[b] … query_starts[b + 1] - 1; the last one sees context_lens[b] tokens, itself
    included, each earlier one a token less.
    """
    attended = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts = query_starts.tolist()
    for request, context_len in enumerate(context_lens.tolist()):
        assert starts[request + 1] - starts[request] <= max_query_len, "more queries than announced"
        for row in range(starts[request], starts[request + 1]):
            seen = context_len - (starts[request + 1] - 1 - row)
            for head in range(shape.num_heads):
                attended[row, head] = attend(q[row, head], kv_cache, block_tables[request], seen, shape, head, kv_scales)
    return attended
