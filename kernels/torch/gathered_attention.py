"""Paged attention by gathering blocks into a dense workspace and calling the fused attention of torch.

Single-query rows (decodes) are padded to the longest of their group. A group is one gather and one attention call per layer:
the query heads that share a key head take the place of query positions, so grouped heads need no copies. Rows are grouped so
that padding wastes little and no group outgrows the workspace. Longer rows (prefill chunks) attend one by one without padding.
All index tensors are created once per step by `GatheredPlanner.plan`; layers only use them.

Slots beyond a row's context belong to other requests or hold old content, possibly NaN: they are zeroed in the gathered copy
and masked, so nothing of them reaches the output. Blocks that a window hides from all queries of a row are not read.

The fused attention has no soft-cap; with one, scores are computed explicitly, in slices of bounded size.

A cache in 8 bits is decoded while it is gathered. Every row then reads its own keys and values from the cache too, rounded as
later rows will see them, so the result does not depend on how a prompt is cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.torch.fp8_decode import decode_kv

GROUP_WASTE_BYTES = 512 * 1024
"""Padding that costs as much as one more attention call: its fixed cost at the copy speed of one core."""

WORKSPACE_BYTES_MAX = 64 * 1024 * 1024
"""Gathered keys and values of one group; a single longer row may exceed this."""

SCORES_MAX = 16 * 1024 * 1024
"""Attention scores in memory at a time when they are computed explicitly."""

SDPA_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Backends for whole texts on a GPU, without cuDNN: from capability 9.0 on torch 2.11 tries cuDNN first, which makes a plan for
each new length, in tenths of a second on the host, more than the rest of the text takes. With a mask cuDNN stays allowed: for
grouped heads only the last of these would accept a mask, with memory for all scores."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Consecutive single-query rows. L is the padded context, M its blocks."""

    first: int
    end: int
    blocks: torch.Tensor  # [B·M] int64
    hidden_slots: torch.Tensor  # [hidden] int64: positions in [B·L] that no query of their row may see
    mask: torch.Tensor  # [B, 1, 1, L], 0 or -inf


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One row of several queries. Without `blocks` its context is the chunk itself.

    `num_keys` is the part of the context that the queries may see, counted from the first slot of `blocks`.
    """

    first: int
    end: int
    num_keys: int
    blocks: torch.Tensor | None  # [M] int64
    mask: torch.Tensor | None  # [query_len, num_keys] bool, True is visible; None is causal, or everything if not causal


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """Index tensors of one step, the same for all layers."""

    shape: AttentionShape
    groups: list[DecodeGroup]
    prefills: list[PrefillRow]
    workspace: torch.Tensor  # flat


class GatheredPlanner:
    """Makes plans and owns the workspace for gathered blocks. `kv_dtype` is the format of the cache; None is `dtype`."""

    def __init__(
        self, shape: AttentionShape, *, dtype: torch.dtype, device: torch.device, kv_dtype: torch.dtype | None = None
    ) -> None:
        self._shape = shape
        self._is_narrowed = kv_dtype not in (None, dtype)
        self._dtype, self._device = dtype, device
        self._block_elements = shape.block_size * 2 * shape.num_kv_heads * shape.head_dim
        self._block_bytes = self._block_elements * torch.empty((), dtype=dtype).element_size()
        self._workspace = torch.empty(0, dtype=dtype, device=device)

    def plan(self, rows: Sequence[AttentionRow]) -> GatheredPlan:
        """The plan of a step. Rows of one query must come first; sorted by context, longest first, they need the least
        padding."""
        num_single = next((i for i, row in enumerate(rows) if row.query_len > 1), len(rows))
        groups = [self._decode_group(rows, first, end) for first, end in self._partition(rows[:num_single])]
        prefills, token = [], num_single
        for row in rows[num_single:]:
            prefills.append(self._prefill_row(row, token, from_cache=self._is_narrowed or row.start > 0))
            token += row.query_len
        self._reserve(max((group.blocks.numel() for group in groups), default=0))
        return GatheredPlan(self._shape, groups, prefills, self._workspace)

    def plan_whole(self, lens: Sequence[int]) -> GatheredPlan:
        """A plan for whole texts of these lengths, one after the other, that needs no cache."""
        prefills, token = [], 0
        for length in lens:
            prefills.append(self._prefill_row(AttentionRow((), length, length), token, from_cache=False))
            token += length
        return GatheredPlan(self._shape, [], prefills, self._workspace)

    def _reserve(self, num_blocks: int) -> None:
        needed = num_blocks * self._block_elements
        if self._workspace.numel() < needed:
            self._workspace = torch.empty(needed + needed // 2, dtype=self._dtype, device=self._device)

    def _visible_blocks(self, row: AttentionRow) -> tuple[int, int]:
        """First and end index into the block table of the blocks that the row's queries may see."""
        window, size = self._shape.sliding_window, self._shape.block_size
        first = 0 if window is None else max(0, row.start + 1 - window) // size
        return first, -(-row.context_len // size)

    def _partition(self, rows: Sequence[AttentionRow]) -> Iterator[tuple[int, int]]:
        """Cut rows into groups wherever padding or the workspace would exceed its bound."""
        first, widest, waste = 0, 0, 0
        for index, row in enumerate(rows):
            start, end = self._visible_blocks(row)
            num_blocks, num_rows = end - start, index - first
            widest_with = max(widest, num_blocks)
            waste_with = waste + (widest_with - widest) * num_rows + widest_with - num_blocks
            too_wide = (num_rows + 1) * widest_with * self._block_bytes > WORKSPACE_BYTES_MAX
            if num_rows and (too_wide or waste_with * self._block_bytes > GROUP_WASTE_BYTES):
                yield first, index
                first, widest_with, waste_with = index, num_blocks, 0
            widest, waste = widest_with, waste_with
        if rows:
            yield first, len(rows)

    def _decode_group(self, rows: Sequence[AttentionRow], first_row: int, end_row: int) -> DecodeGroup:
        size, window = self._shape.block_size, self._shape.sliding_window
        spans = [self._visible_blocks(row) for row in rows[first_row:end_row]]
        width = max(end - start for start, end in spans)
        blocks = np.zeros((end_row - first_row, width), dtype=np.int64)
        for table, row, (start, end) in zip(blocks, rows[first_row:end_row], spans, strict=True):
            table[: end - start] = row.block_table[start:end]
        ends = np.array(
            [row.context_len - start * size for row, (start, _) in zip(rows[first_row:end_row], spans, strict=True)]
        )
        positions = np.arange(width * size)
        hidden = positions[None, :] >= ends[:, None]
        if window is not None:
            hidden |= positions[None, :] < ends[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(hidden), float("-inf"))
        return DecodeGroup(
            first=first_row,
            end=end_row,
            blocks=torch.from_numpy(blocks.reshape(-1)).to(self._device),
            hidden_slots=torch.from_numpy(np.flatnonzero(hidden)).to(self._device),
            mask=mask[:, None, None, :].to(self._device),
        )

    def _prefill_row(self, row: AttentionRow, token: int, *, from_cache: bool) -> PrefillRow:
        shape = self._shape
        blocks, offset = None, 0
        if from_cache:
            first, end = self._visible_blocks(row)
            blocks = torch.from_numpy(np.array(row.block_table[first:end], dtype=np.int64)).to(self._device)
            offset = first * shape.block_size
        narrow = shape.sliding_window is not None and row.context_len > shape.sliding_window
        mask = self._mask(row, offset) if shape.causal and (row.start or narrow or shape.softcap is not None) else None
        return PrefillRow(token, token + row.query_len, row.context_len - offset, blocks, mask)

    def _mask(self, row: AttentionRow, offset: int) -> torch.Tensor:
        queries = torch.arange(row.start, row.context_len)[:, None]
        keys = torch.arange(offset, row.context_len)[None, :]
        mask = keys <= queries
        if self._shape.sliding_window is not None:
            mask &= keys > queries - self._shape.sliding_window
        return mask.to(self._device)


def gathered_attention(
    qkv: torch.Tensor, kv_cache: torch.Tensor | None, plan: GatheredPlan, kv_scales: torch.Tensor | None
) -> torch.Tensor:
    """Attention of the rows of a plan.

    qkv: [T, H+2K, D] rotated, kv_cache: [N, P, 2, K, D] already written, None for a plan of whole texts → [T, H, D]
    kv_scales: [2] float32 of keys and of values, for a cache in e4m3; None is one.
    """
    shape = plan.shape
    out = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    for group in plan.groups:
        assert kv_cache is not None, "decodes read the cache"
        _attend_group(qkv, kv_cache, plan, group, out, kv_scales)
    for row in plan.prefills:
        _attend_row(qkv, kv_cache, shape, row, out, kv_scales)
    return out


def _attend_group(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: GatheredPlan,
    group: DecodeGroup,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    shape, batch = plan.shape, group.end - group.first
    num_blocks = group.blocks.shape[0]
    block_elements = kv_cache[0].numel()
    gathered = plan.workspace[: num_blocks * block_elements].view(num_blocks, block_elements)
    if kv_cache.dtype is gathered.dtype:
        torch.index_select(kv_cache.view(-1, block_elements), 0, group.blocks, out=gathered)
    else:
        gathered.copy_(decode_kv(kv_cache.index_select(0, group.blocks), gathered.dtype, kv_scales).flatten(1))
    slots = gathered.view(num_blocks * shape.block_size, 2 * shape.num_kv_heads * shape.head_dim)
    slots.index_fill_(0, group.hidden_slots, 0.0)
    kv = slots.view(batch, -1, 2, shape.num_kv_heads, shape.head_dim)
    queries = qkv[group.first : group.end, : shape.num_heads].view(batch, shape.num_kv_heads, shape.group, shape.head_dim)
    keys, values = kv[:, :, 0].transpose(1, 2), kv[:, :, 1].transpose(1, 2)
    if shape.softcap is None:
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=shape.scale)
    else:
        probabilities = capped_scores(queries @ keys.transpose(-1, -2), shape).add_(group.mask).softmax(dim=-1)
        attended = probabilities.to(values.dtype) @ values
    out[group.first : group.end] = attended.flatten(1, 2)


def _attend_row(
    qkv: torch.Tensor,
    kv_cache: torch.Tensor | None,
    shape: AttentionShape,
    row: PrefillRow,
    out: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    chunk = qkv[row.first : row.end]
    if row.blocks is None:
        keys, values = chunk[:, heads : heads + kv_heads], chunk[:, heads + kv_heads :]
    else:
        assert kv_cache is not None, "a later chunk reads the cache"
        slots = kv_cache.index_select(0, row.blocks).flatten(0, 1)[: row.num_keys]
        if slots.dtype is not qkv.dtype:
            slots = decode_kv(slots, qkv.dtype, kv_scales)
        keys, values = slots[:, 0], slots[:, 1]
    queries, keys, values = chunk[:, :heads].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1)
    if shape.softcap is not None:
        out[row.first : row.end] = _attend_explicitly(queries, keys, values, row.mask, shape).transpose(0, 1)
        return
    with sdpa_kernel(SDPA_WITHOUT_CUDNN) if chunk.is_cuda and row.mask is None else nullcontext():
        attended = functional.scaled_dot_product_attention(
            queries.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=row.mask,
            is_causal=shape.causal and row.mask is None,
            scale=shape.scale,
            enable_gqa=heads != kv_heads,
        )
    out[row.first : row.end] = attended[0].transpose(0, 1)


def _attend_explicitly(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, shape: AttentionShape
) -> torch.Tensor:
    """queries: [H, Q, D], keys and values: [K, C, D], mask: [Q, C] bool → [H, Q, D], with soft-capped scores"""
    num_queries, num_keys = queries.shape[1], keys.shape[1]
    step = max(1, SCORES_MAX // (shape.num_heads * num_keys))
    chunks = []
    for first in range(0, num_queries, step):
        chunk = queries[:, first : first + step]
        stacked = chunk.reshape(shape.num_kv_heads, -1, shape.head_dim)  # query heads of one key head, stacked
        scores = capped_scores(stacked @ keys.transpose(-1, -2), shape).view(shape.num_heads, -1, num_keys)
        if mask is not None:
            scores.masked_fill_(~mask[first : first + step], float("-inf"))
        probabilities = scores.softmax(dim=-1).to(values.dtype).view(shape.num_kv_heads, -1, num_keys)
        chunks.append((probabilities @ values).view(shape.num_heads, -1, shape.head_dim))
    return torch.cat(chunks, dim=1)


def capped_scores(products: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Products of queries and keys → bounded scores in float32."""
    assert shape.softcap is not None
    return products.float().mul_(shape.product_scale / shape.softcap).tanh_().mul_(shape.softcap)
