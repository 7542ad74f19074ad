"""Paged attention by gathering blocks into a dense workspace and calling the fused attention of torch.

Single-query rows (decodes) are padded to the longest of their group, and one group is one gather and one attention call
per layer: the query heads that share a key head stand in the place of query positions, so grouped heads need no copies.
Rows are grouped so that padding wastes little and no group outgrows the workspace. Longer rows (prefill chunks) attend
one by one without padding. All index tensors are made once per step by `AttentionPlanner.plan`; layers only use them.

Slots beyond a row's context belong to somebody else or hold old content, NaN included: they are zeroed in the gathered
copy and masked, so nothing of them reaches the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from kernels.attention_rows import AttentionRow, AttentionShape

GROUP_WASTE_BYTES = 512 * 1024
"""Padding worth one more attention call: about the time of its fixed cost at the copy speed of one core."""

WORKSPACE_BYTES_MAX = 64 * 1024 * 1024
"""Gathered keys and values of one group; a single longer row still gets what it needs."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Consecutive single-query rows. L is the padded context, M its blocks."""

    first: int
    last: int
    blocks: torch.Tensor  # [B·M] int64
    hidden_slots: torch.Tensor  # [hidden] int64: positions in [B·L] that no query of their row may see
    mask: torch.Tensor  # [B, 1, 1, L], 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several queries. Without `blocks` its context is the chunk itself."""

    first: int
    last: int
    context_len: int
    blocks: torch.Tensor | None  # [M] int64
    mask: torch.Tensor | None  # [query_len, context_len] bool; None is causal


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Index tensors of one step, the same for all layers."""

    shape: AttentionShape
    groups: list[DecodeGroup]
    prefills: list[PrefillRow]
    workspace: torch.Tensor  # flat


class AttentionPlanner:
    """Makes plans and owns the workspace that gathered blocks go to."""

    def __init__(self, shape: AttentionShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype, self._device = dtype, device
        self._block_elements = shape.block_size * 2 * shape.num_kv_heads * shape.head_dim
        self._block_bytes = self._block_elements * torch.empty((), dtype=dtype).element_size()
        self._workspace = torch.empty(0, dtype=dtype, device=device)

    def plan(self, rows: Sequence[AttentionRow]) -> AttentionPlan:
        """Rows of one query must come first; sorted by context, longest first, they pad least."""
        num_single = next((i for i, row in enumerate(rows) if row.query_len > 1), len(rows))
        groups = [self._decode_group(rows, first, last) for first, last in self._partition(rows[:num_single])]
        prefills, token = [], num_single
        for row in rows[num_single:]:
            prefills.append(self._prefill_row(row, token))
            token += row.query_len
        self._reserve(max((group.blocks.numel() for group in groups), default=0))
        return AttentionPlan(self._shape, groups, prefills, self._workspace)

    def _reserve(self, num_blocks: int) -> None:
        needed = num_blocks * self._block_elements
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed + needed // 2, dtype=self._dtype, device=self._device)

    def _visible_blocks(self, row: AttentionRow) -> tuple[int, int]:
        """First and end index into the block table of what the row's queries may see."""
        window, size = self._shape.sliding_window, self._shape.block_size
        first = 0 if window is None else max(0, row.start + 1 - window) // size
        return first, -(-row.context_len // size)

    def _partition(self, rows: Sequence[AttentionRow]) -> Iterator[tuple[int, int]]:
        """Cut rows into groups where padding or the workspace would grow beyond its bound."""
        first, widest, waste = 0, 0, 0
        for index, row in enumerate(rows):
            start, end = self._visible_blocks(row)
            num_blocks, count = end - start, index - first
            widest_with = max(widest, num_blocks)
            waste_with = waste + (widest_with - widest) * count + widest_with - num_blocks
            too_wide = (count + 1) * widest_with * self._block_bytes > WORKSPACE_BYTES_MAX
            if count and (too_wide or waste_with * self._block_bytes > GROUP_WASTE_BYTES):
                yield first, index
                first, widest_with, waste_with = index, num_blocks, 0
            widest, waste = widest_with, waste_with
        if rows:
            yield first, len(rows)

    def _decode_group(self, rows: Sequence[AttentionRow], first: int, last: int) -> DecodeGroup:
        size, window = self._shape.block_size, self._shape.sliding_window
        spans = [self._visible_blocks(row) for row in rows[first:last]]
        width = max(end - start for start, end in spans)
        blocks = np.zeros((last - first, width), dtype=np.int64)
        for line, row, (start, end) in zip(blocks, rows[first:last], spans, strict=True):
            line[: end - start] = row.block_table[start:end]
        ends = np.array([row.context_len - start * size for row, (start, _) in zip(rows[first:last], spans, strict=True)])
        positions = np.arange(width * size)
        hidden = positions[None, :] >= ends[:, None]
        if window is not None:
            hidden |= positions[None, :] < ends[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return DecodeGroup(
            first=first,
            last=last,
            blocks=torch.from_numpy(blocks.reshape(-1)).to(self._device),
            hidden_slots=torch.from_numpy(np.flatnonzero(hidden)).to(self._device),
            mask=mask[:, None, None, :].to(self._device),
        )

    def _prefill_row(self, row: AttentionRow, token: int) -> PrefillRow:
        window = self._shape.sliding_window
        narrow = window is not None and row.context_len > window
        blocks = mask = None
        if row.start:
            num_blocks = -(-row.context_len // self._shape.block_size)
            blocks = torch.tensor(row.block_table[:num_blocks], dtype=torch.int64).to(self._device)
        if row.start or narrow:
            queries = torch.arange(row.start, row.context_len)[:, None]
            keys = torch.arange(row.context_len)[None, :]
            mask = keys <= queries
            if window is not None:
                mask &= keys > queries - window
            mask = mask.to(self._device)
        return PrefillRow(token, token + row.query_len, row.context_len, blocks, mask)


def write_kv(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """kv: [T, 2K, D] (keys, then values), kv_cache: [N, P, 2, K, D], slot_mapping: [T] int64; writes in place."""
    kv_cache.view(kv_cache.shape[0] * kv_cache.shape[1], -1).index_copy_(0, slot_mapping, kv.flatten(1))


def paged_attention(qkv: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
    """qkv: [T, H+2K, D] rotated, kv_cache: [N, P, 2, K, D] already written → [T, H, D]"""
    shape = plan.shape
    out = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    for group in plan.groups:
        _attend_group(qkv, kv_cache, plan, group, out)
    for row in plan.prefills:
        _attend_row(qkv, kv_cache, shape, row, out)
    return out


def _attend_group(
    qkv: torch.Tensor, kv_cache: torch.Tensor, plan: AttentionPlan, group: DecodeGroup, out: torch.Tensor
) -> None:
    shape, batch = plan.shape, group.last - group.first
    heads_per_kv = shape.num_heads // shape.num_kv_heads
    num_blocks = group.blocks.shape[0]
    block_elements = kv_cache[0].numel()
    gathered = plan.workspace[: num_blocks * block_elements].view(num_blocks, block_elements)
    torch.index_select(kv_cache.view(-1, block_elements), 0, group.blocks, out=gathered)
    slots = gathered.view(num_blocks * shape.block_size, 2 * shape.num_kv_heads * shape.head_dim)
    slots.index_fill_(0, group.hidden_slots, 0.0)
    kv = slots.view(batch, -1, 2, shape.num_kv_heads, shape.head_dim)
    queries = qkv[group.first : group.last, : shape.num_heads].view(batch, shape.num_kv_heads, heads_per_kv, shape.head_dim)
    keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
    out[group.first : group.last] = attended.flatten(1, 2)


def _attend_row(qkv: torch.Tensor, kv_cache: torch.Tensor, shape: AttentionShape, row: PrefillRow, out: torch.Tensor) -> None:
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    chunk = qkv[row.first : row.last]
    if row.blocks is None:
        keys, values = chunk[:, heads : heads + kv_heads], chunk[:, heads + kv_heads :]
    else:
        slots = kv_cache.index_select(0, row.blocks).flatten(0, 1)[: row.context_len]
        keys, values = slots[:, 0], slots[:, 1]
    attended = functional.scaled_dot_product_attention(
        chunk[:, :heads].transpose(0, 1).unsqueeze(0),
        keys.transpose(0, 1).unsqueeze(0),
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=row.mask,
        is_causal=row.mask is None,
        enable_gqa=heads != kv_heads,
    )
    out[row.first : row.last] = attended[0].transpose(0, 1)
