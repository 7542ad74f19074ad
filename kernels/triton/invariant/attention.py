"""Batch-invariant paged attention: one kernel for decodes, chunks of any length and drafts, with bits independent of the
batch.

The keys of a request are split at multiples of SPLIT for every query, and every query is processed in the same tile of rows by
the same instructions. The results of its splits are merged in order: in registers if one program computes all splits of its
queries, by a second kernel if programs share them. Both merge with the same function, and all roundings are explicit (no
product is fused with a sum), so the bits do not depend on which one merges. The number of programs that share a tile depends
only on the numbers of rows, requests and possible splits, so a captured graph may keep it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.decode import check_attention, score_factor
from kernels.triton.attention.query_tiles import max_query_tiles
from kernels.triton.attention.splits import scheduled_requests, shape_constants
from kernels.triton.invariant.attention_kernels import merge_rows_kernel, rows_kernel
from kernels.triton.launching.card_properties import capability, card, multiprocessors, power_of_two
from kernels.triton.launching.early_launch import early_launch

SPLIT = 256
"""Tokens: 128 KiB of 16-bit keys and values of heads of 128. Writing and reading a split's partial results adds a fiftieth."""
MERGE_UNROLL, MERGE_WARPS = 8, 1
PROGRAMS_MIN, PROGRAMS_MULTIPROCESSOR = 8, 4
"""The fewest programs that share the splits of a tile, for one long request among many short ones; and, with few tiles,
programs per multiprocessor: twice as many as fit. Programs without a split exit at once."""
WORKSPACE_BYTES_MAX = 256 * 1024 * 1024
"""For the partial results that the second kernel merges (`engine.memory.splits` counts it in the memory plan). Decodes that
need more are computed in several launches, and chunks are not shared among programs."""
WORKSPACE_QUERIES_MIN = 64
"""The fewest queries that the workspace holds all splits of, within WORKSPACE_BYTES_MAX, for chunks in engines of fewer
requests."""


@dataclass(frozen=True, slots=True)
class RowsTiling:
    """`rows` queries, counting those of all heads of a KV head, and `keys` keys at a time: determined by the heads and the
    card."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def rows_tiling(head_dim: int, kv_bytes: int, group: int, capability: int) -> RowsTiling:
    """64 rows are the minimum of Hopper's matrix instruction. A decode fills only a few of them, which costs a quarter of the
    time in which its keys are read from memory; in a prompt, 64 rows share what they load. float32 has no matrix instruction:
    its operands are in registers, which suffice only for small tiles."""
    if kv_bytes == 4:
        return RowsTiling(max(32, power_of_two(group)), 16, 8, 2)
    width, rows = power_of_two(head_dim), max(64, power_of_two(group))
    is_small = card(capability).is_small
    if width >= 256:
        return RowsTiling(rows, 32 if capability >= 90 and not is_small else 16, 8, 2)
    keys = min(64, (4096 if capability < 90 or is_small else 8192) // width)
    is_lean = rows == 64 and (width < 128 or 90 <= capability < 100)  # two programs of four warps fit on Hopper
    return RowsTiling(rows, keys, 4 if is_lean else 8, 3)


class RowsWorkspace(NamedTuple):
    """Memory for C partial results, one per query, head and split. One workspace serves all layers and steps."""

    partial_acc: torch.Tensor  # [C · D] float32: sums of weighted values
    partial_stats: torch.Tensor  # [C · 2] float32: sum of weights and maximal score of each

    @property
    def num_partials(self) -> int:
        return self.partial_stats.numel() // 2


def decode_workspace(
    shape: AttentionShape,
    max_requests: int,
    max_blocks: int,
    kv_dtype: torch.dtype,  # noqa: ARG001 - part of the operation's signature
    device: torch.device,
) -> RowsWorkspace | None:
    """Memory for decodes of `max_requests` requests of up to `max_blocks` blocks, and for chunks; None if nothing is split.

    For all requests at once, up to WORKSPACE_BYTES_MAX. Llama-3.1-8B, 256 requests of 8k tokens: 130 MiB.
    """
    splits = _max_splits(shape, max_blocks, 1)
    if splits == 1:
        return None
    return _workspace(shape, _num_partials(shape, max(max_requests, WORKSPACE_QUERIES_MIN), splits), device)


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: RowsWorkspace | None = None,
) -> torch.Tensor:
    """As `kernels.triton.attention.decode.paged_decode` with one query per request, with the same bits as `paged_prefill` here.

    Bytes: all visible keys and values, once; 4 · (D + 2) · H per split of SPLIT tokens, written and read again. Operations: 4 ·
    D · 64 rows per token and KV head. The order of a row's sums does not depend on the batch, and the launch does not depend on
    lengths. Without a `workspace` one is allocated.
    """
    num_requests, max_blocks = block_tables.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    splits = _max_splits(shape, max_blocks, 1)
    if workspace is None:
        workspace = _workspace(shape, _num_partials(shape, num_requests, splits) if splits > 1 else 0, q.device)
    batch_size = max(1, workspace.num_partials // (shape.num_heads * splits) if splits > 1 else num_requests)
    for first in range(0, num_requests, batch_size):
        batch = slice(first, first + batch_size)
        starts = _unit_query_starts(q.device, power_of_two(min(batch_size, num_requests) + 1))
        _attend_rows(
            q[batch], kv_cache, block_tables[batch], starts[: len(q[batch]) + 1], context_lens[batch], shape,
            splits=splits, kv_scales=kv_scales, out=out[batch], workspace=workspace,
        )  # fmt: skip
    return out


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    max_query_len: int,
    any_lengths: bool = False,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: RowsWorkspace | None = None,
) -> torch.Tensor:
    """As `kernels.triton.attention.prefill.paged_prefill`; a query has the same bits at any position in a chunk of any length,
    and as a decode, as long as the keys and values of its request are finite.

    Bytes: keys and values once per tile of 64 rows, mostly from L2. Operations: 4 · D · 64 rows per key of each tile. Programs
    share the splits of a tile only if one program per tile would not fill the card, or with `any_lengths`, and if the partial
    results fit the `workspace` of decodes or, without one, the limit of an allocated one.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    splits = _max_splits(shape, block_tables.shape[1], max_query_len)
    needed = q.shape[0] * shape.num_heads * splits
    capacity = _num_partials(shape, q.shape[0], splits) if workspace is None else workspace.num_partials
    num_tiles = _num_tiles(q, kv_cache, block_tables, shape) * shape.num_kv_heads
    if (num_tiles >= 2 * multiprocessors(q.device) and not any_lengths) or needed > capacity:
        splits = 1
    if workspace is None:
        workspace = _workspace(shape, needed if splits > 1 else 0, q.device)
    return _attend_rows(
        q, kv_cache, block_tables, query_starts, context_lens, shape,
        splits=splits, kv_scales=kv_scales, out=out, workspace=workspace,
    )  # fmt: skip


def _attend_rows(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    splits: int,
    kv_scales: torch.Tensor | None,
    out: torch.Tensor,
    workspace: RowsWorkspace,
) -> torch.Tensor:
    """splits: the most splits of a query if programs share them, else 1."""
    check_attention(q, kv_cache, shape)
    assert out.is_contiguous(), "out must be contiguous"
    num_requests = block_tables.shape[0]
    if not num_requests or not q.shape[0]:
        return out
    tiling = _tiling(shape, kv_cache)
    early, requests = early_launch(q.device, q.shape[0]), scheduled_requests(num_requests)
    num_tiles = _num_tiles(q, kv_cache, block_tables, shape)
    rows_kernel[(num_tiles * shape.num_kv_heads, _num_programs(num_tiles * shape.num_kv_heads, splits, q.device))](
        q, kv_cache, block_tables, query_starts, context_lens, kv_scales, out, *workspace,
        num_requests, num_tiles, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0), splits,
        **rows_constants(shape, tiling), REQUESTS=requests, **early,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        merge_rows_kernel[(q.shape[0], shape.num_heads)](
            query_starts, context_lens, kv_scales, out, *workspace, num_requests, splits,
            **merge_constants(shape), REQUESTS=requests, UNROLL=MERGE_UNROLL, **early,
            num_warps=MERGE_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _num_programs(num_tiles: int, splits: int, device: torch.device) -> int:
    """Programs that share the splits of a tile and KV head, which affects only the time. A single program also merges them."""
    return min(splits, max(PROGRAMS_MIN, -(-PROGRAMS_MULTIPROCESSOR * multiprocessors(device) // num_tiles)))


def _num_partials(shape: AttentionShape, num_queries: int, splits: int) -> int:
    """Partial results that a workspace for `num_queries` queries holds: all within WORKSPACE_BYTES_MAX, but at least those of
    one query."""
    partials_max = WORKSPACE_BYTES_MAX // ((shape.head_dim + 2) * torch.float32.itemsize)
    return max(shape.num_heads * splits, min(num_queries * shape.num_heads * splits, partials_max))


def _workspace(shape: AttentionShape, num_partials: int, device: torch.device) -> RowsWorkspace:
    partial_acc = torch.empty(num_partials * shape.head_dim, dtype=torch.float32, device=device)
    return RowsWorkspace(partial_acc, torch.empty(num_partials * 2, dtype=torch.float32, device=device))


@functools.cache
def _unit_query_starts(device: torch.device, size: int) -> torch.Tensor:
    """`query_starts` of requests with one query each: [size] int32, cached permanently."""
    return torch.arange(size, dtype=torch.int32, device=device)


def _num_tiles(q: torch.Tensor, kv_cache: torch.Tensor, block_tables: torch.Tensor, shape: AttentionShape) -> int:
    return max_query_tiles(q.shape[0], block_tables.shape[0], _tiling(shape, kv_cache).rows // shape.group)


def _max_splits(shape: AttentionShape, max_blocks: int, max_query_len: int) -> int:
    """The most splits that the queries of a tile, and so any one query, attend to."""
    splits = -(-max_blocks * shape.block_size // SPLIT)
    if shape.sliding_window is not None:
        # A tile of at most 64 queries begins up to a tile of keys before its first window; both ends may be within a split.
        splits = min(splits, (shape.sliding_window + min(max_query_len, 64) + 128) // SPLIT + 2)
    return max(1, splits)


def _tiling(shape: AttentionShape, kv_cache: torch.Tensor) -> RowsTiling:
    return rows_tiling(shape.head_dim, kv_cache.element_size(), shape.group, capability(kv_cache.device))


def rows_constants(shape: AttentionShape, tiling: RowsTiling) -> dict[str, object]:
    """Constants of `rows_kernel`, except REQUESTS."""
    return shape_constants(shape) | {"SPLIT": SPLIT, "ROWS": tiling.rows, "KEYS": tiling.keys}


def merge_constants(shape: AttentionShape) -> dict[str, object]:
    """Constants of `merge_rows_kernel` that the shape determines."""
    sizes = {"H": shape.num_heads, "D": shape.head_dim, "WIDTH": power_of_two(shape.head_dim)}
    return {**sizes, "WINDOW": shape.sliding_window or 0, "SPLIT": SPLIT}
