"""The inputs of paged attention for one step: block tables and lengths as tensors on the device, no lists, no masks.

A plan is made from rows that the host knows (`PagedPlanner`), or refers to buffers that the device fills itself (a decode step
over slots). Kernels see no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from kernels.attention_rows import AttentionRow, AttentionShape
from kernels.operations import FUSED_ROWS_MAX, Operations
from kernels.transfer import send


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Rows of one step: the first `num_decodes` have one query each, the others those between consecutive `query_starts`.

    `counts_all`: only the device knows how many decodes there are; `num_decodes` is the most. Tokens of longer rows
    directly follow those of the actual decodes; the attention of decodes writes to the places of these tokens too, and is
    overwritten."""

    shape: AttentionShape
    num_decodes: int
    block_tables: torch.Tensor  # [B, M] int32
    context_lens: torch.Tensor  # [B] int32, 0 for a row that is padding
    query_starts: torch.Tensor | None = None  # [B - num_decodes + 1] int32, counted from token `num_decodes`, or from 0
    max_query_len: int = 1
    workspace: Any = None  # of `paged_decode`, and of `paged_prefill` where it has one
    is_newest: bool = False  # every row is the newest token of a request of its own, or padding
    counts_all: bool = False

    @property
    def takes_projections(self) -> bool:
        """Whether `rotated_decode` replaces the two operations that it combines: in steps of few rows. Each split of a request
        rotates its queries again, which with many rows takes longer than the launch that is saved."""
        return self.is_newest and self.num_decodes <= FUSED_ROWS_MAX


class PagedPlanner:
    """Makes plans for the rows of a step. Rows of one query come first."""

    def __init__(self, shape: AttentionShape, *, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self.workspace: Any = None
        """The workspace of `paged_decode` for the largest step; if it is None, each call allocates its own."""

    def plan(self, rows: Sequence[AttentionRow]) -> PagedPlan:
        num_decodes = next((i for i, row in enumerate(rows) if row.query_len > 1), len(rows))
        size = self._shape.block_size
        width = max((-(-row.context_len // size) for row in rows), default=0)
        tables = np.zeros((len(rows), width), dtype=np.int32)
        for table, row in zip(tables, rows, strict=True):
            num_blocks = -(-row.context_len // size)
            table[:num_blocks] = row.block_table[:num_blocks]
        context_lens = np.array([row.context_len for row in rows], dtype=np.int32)
        query_lens = [row.query_len for row in rows[num_decodes:]]
        starts = np.cumsum([0, *query_lens], dtype=np.int32)
        packed = send(np.concatenate((tables.reshape(-1), context_lens, starts)), torch.int32, self._device)
        return PagedPlan(
            self._shape,
            num_decodes,
            packed[: tables.size].view(tables.shape),
            packed[tables.size : tables.size + len(rows)],
            packed[tables.size + len(rows) :] if query_lens else None,
            max(query_lens, default=1),
            self.workspace,
        )

    def plan_like(self, plan: PagedPlan) -> PagedPlan:
        """The same rows for another shape: their tensors on the device are shared."""
        return replace(plan, shape=self._shape, workspace=self.workspace)


def paged_plan_attention(
    operations: Operations,
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: PagedPlan,
    kv_scales: torch.Tensor | None,
) -> torch.Tensor:
    """Attention over pages. qkv: [T, H+2K, D] rotated, kv_cache: [N, P, 2, K, D] already written → [T, H, D]"""
    shape, num_decodes = plan.shape, plan.num_decodes
    queries = qkv[:, : shape.num_heads]
    if plan.query_starts is None:
        return operations.paged_decode(
            queries,
            kv_cache,
            plan.block_tables,
            plan.context_lens,
            shape,
            kv_scales=kv_scales,
            workspace=plan.workspace,
        )
    out = torch.empty(qkv.shape[0], shape.num_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_decodes:
        operations.paged_decode(
            queries[:num_decodes],
            kv_cache,
            plan.block_tables[:num_decodes],
            plan.context_lens[:num_decodes],
            shape,
            kv_scales=kv_scales,
            out=out[:num_decodes],
            workspace=plan.workspace,
        )
    first = 0 if plan.counts_all else num_decodes
    operations.paged_prefill(
        queries[first:],
        kv_cache,
        plan.block_tables[num_decodes:],
        plan.query_starts,
        plan.context_lens[num_decodes:],
        shape,
        max_query_len=plan.max_query_len,
        any_lengths=plan.counts_all,
        kv_scales=kv_scales,
        out=out[first:],
        workspace=plan.workspace,
    )
    return out
