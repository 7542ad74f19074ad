"""Paged attention in plain torch over rows in tensors: block tables and lengths that the host does not know.

The twin of the kernels that decode in graphs, so that slots and graphs can be tested without a GPU. Serving on CPUs plans rows
on the host (`kernels.torch.gathered_attention`), which is faster: there a batch is split wherever padding would waste time.
"""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionShape
from kernels.torch.blocks import indexable


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: None = None,  # noqa: ARG001 - the kernels' signature
) -> torch.Tensor:
    """Attention of one query per request.

    q: [B, H, D], kv_cache: [N, P, 2, K, D], block_tables: [B, M] int32, context_lens: [B] int32, 0 for no row → [B, H, D]
    """
    starts = torch.arange(len(context_lens) + 1, device=q.device)
    return paged_prefill(q, kv_cache, block_tables, starts, context_lens, shape, max_query_len=1, kv_scales=kv_scales, out=out)


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    max_query_len: int,
    any_lengths: bool = False,  # noqa: ARG001 - the kernels' signature
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: None = None,  # noqa: ARG001 - the kernels' signature
) -> torch.Tensor:
    """Causal attention of consecutive queries of each request.

    q: [T, H, D], query_starts: [B + 1]; the last query of a row sees context_lens[b] tokens, each one before it a token less
    → [T, H, D]
    """
    result = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for row, context_len in enumerate(lengths):
        first, end = starts[row], starts[row + 1]
        assert end - first <= max_query_len, "more queries than announced"
        if not context_len:
            result[first:end] = 0.0
            continue
        blocks = block_tables[row, : -(-context_len // shape.block_size)].long()
        result[first:end] = _attend(q[first:end], kv_cache, blocks, context_len, shape, kv_scales)
    return result


def _attend(
    queries: torch.Tensor,
    kv_cache: torch.Tensor,
    blocks: torch.Tensor,
    context_len: int,
    shape: AttentionShape,
    kv_scales: torch.Tensor | None,
) -> torch.Tensor:
    """queries: [Q, H, D], the newest of `context_len` tokens → [Q, H, D]"""
    slots = indexable(kv_cache).index_select(0, blocks).view(kv_cache.dtype).flatten(0, 1)[:context_len]  # [C, 2, K, D]
    slots = slots.to(queries.dtype) if kv_scales is None else (slots.float() * kv_scales[:, None, None]).to(queries.dtype)
    keys, values = (slots[:, i].transpose(0, 1).repeat_interleave(shape.group, 0) for i in (0, 1))  # [H, C, D]
    scores = (queries.transpose(0, 1) @ keys.transpose(1, 2)).float() * shape.product_scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    positions = torch.arange(context_len, device=queries.device)
    query_positions = positions[context_len - queries.shape[0] :, None]
    hidden = positions[None, :] > query_positions
    if shape.sliding_window is not None:
        hidden |= positions[None, :] <= query_positions - shape.sliding_window
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
    return (weights.to(values.dtype) @ values).transpose(0, 1)
