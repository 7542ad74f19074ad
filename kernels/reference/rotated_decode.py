"""A decode that rotates its newest token itself, row by row: each row sees the old cache, and its own new key and value."""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention_rows import AttentionShape
from kernels.reference.attention import paged_decode
from kernels.reference.rope_and_cache import rope_and_cache


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
    workspace: Any = None,  # noqa: ARG001 - the kernels' signature
) -> torch.Tensor:
    """`rope_and_cache`, then `paged_decode`: qkv: [B, H+2K, D], not changed → [B, H, D]; keys and values go to the cache.

    A row does not see what other rows write in this call, so the results for rows of one request differ from
    those of the two operations.
    """
    places = {slot: divmod(slot, shape.block_size) for slot in slot_mapping.tolist() if slot >= 0}
    old_slots, rotated = {slot: kv_cache[place].clone() for slot, place in places.items()}, qkv.clone()
    rope_and_cache(
        rotated, cos, sin, kv_cache, slot_mapping, num_kv_heads=shape.num_kv_heads, rotary_dim=rotary_dim,
        q_weight=q_weight, k_weight=k_weight, eps=eps, kv_scales=kv_scales,
    )  # fmt: skip
    new_slots = {slot: kv_cache[place].clone() for slot, place in places.items()}
    for slot, place in places.items():
        kv_cache[place] = old_slots[slot]
    out = torch.zeros(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            kv_cache[places[slot]] = new_slots[slot]
        queries, single = rotated[row : row + 1, : shape.num_heads], slice(row, row + 1)
        out[row] = paged_decode(queries, kv_cache, block_tables[single], context_lens[single], shape, kv_scales=kv_scales)[0]
        if slot >= 0:
            kv_cache[places[slot]] = old_slots[slot]
    for slot, place in places.items():
        kv_cache[place] = new_slots[slot]
    return out
