"""Causal attention of queries over the blocks of the paged cache, read in place: nothing is gathered or padded.

Queries that share their keys form a tile (`attention_tile`): the query heads of one key head, and in longer rows several
consecutive queries. The tile of a decode covers several neighbouring key heads, which are contiguous in memory, so that a row's
keys and values are read together and in order. Reads 2 · context · D elements for each tile.
"""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionShape
from kernels.simd.attention_tile import HEAD_DIM_MAX, TILE_ROWS, attend_tile
from kernels.simd.compiling import entry, subroutine, task
from kernels.simd.launching import Launch, empty
from kernels.simd.threads import argument, float_argument, run, thread_and_count
from kernels.simd.vectors import BYTES, LANES, clear, load_int32


def can_attend(shape: AttentionShape) -> bool:
    """Whether the attention here supports these heads."""
    return shape.causal and shape.head_dim % LANES == 0 and shape.head_dim <= HEAD_DIM_MAX


@subroutine
def _num_keys(lengths, num_rows):
    """Keys of all rows; a row without any counts as one, because its output is written too."""
    total = 0
    for row in range(num_rows):
        total += max(load_int32(lengths, row), 1)
    return total


@subroutine
def _head_at(position, keys, num_kv_heads):
    """The first key head of a row that begins at or after `position`, which counts the keys that all its heads have to read."""
    return min(max((position + keys - 1) // keys, 0), num_kv_heads)


@task
def _attend_rows(a):
    """Tiles of all rows. Each thread takes every n-th tile of prompts. Decodes are divided by key heads, row by row: each
    thread has as many keys to read, mostly whole rows, and neighbouring heads of a row are one tile."""
    q, q_stride, cache, tables, table_width = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4)
    starts, lengths, num_rows, out = argument(a, 5), argument(a, 6), argument(a, 7), argument(a, 8)
    num_heads, num_kv_heads, head_dim, block_size = argument(a, 9), argument(a, 10), argument(a, 11), argument(a, 12)
    window, scale, softcap = argument(a, 13), float_argument(a, 14), float_argument(a, 15)
    index, threads = thread_and_count(a)
    group = num_heads // num_kv_heads
    heads = min(group, TILE_ROWS)
    queries_per_tile = TILE_ROWS // heads
    kv_heads_per_tile = queries_per_tile if heads == group and not starts else 1
    total_keys = 0 if starts else _num_keys(lengths, num_rows) * num_kv_heads
    begin_key, end_key = total_keys * index // threads, total_keys * (index + 1) // threads
    keys_before = tile = 0
    for row in range(num_rows):
        context = load_int32(lengths, row)
        first, end, kv_first, kv_end = row, row + 1, 0, num_kv_heads
        if starts:
            first, end = load_int32(starts, row), load_int32(starts, row + 1)
        else:
            keys = max(context, 1)
            kv_first, kv_end = (
                _head_at(begin_key - keys_before, keys, num_kv_heads),
                _head_at(end_key - keys_before, keys, num_kv_heads),
            )
            keys_before += keys * num_kv_heads
        for query in range(first, end, queries_per_tile):
            count = min(queries_per_tile, end - query)
            for kv_head in range(kv_first, kv_end, kv_heads_per_tile):
                tile += 1
                if starts and tile % threads != index:
                    continue
                kv_heads = min(kv_heads_per_tile, kv_end - kv_head)
                for head in range(kv_head * group, (kv_head + kv_heads) * group, kv_heads * heads):
                    width = min(heads, (kv_head + kv_heads) * group - head)
                    target = out + (query * num_heads + head) * head_dim * BYTES
                    if context == 0:
                        for query_index in range(count):
                            clear(target + query_index * num_heads * head_dim * BYTES, kv_heads * width * head_dim)
                        continue
                    attend_tile(
                        kv_heads, width * count, width, q + (query * q_stride + head * head_dim) * BYTES, q_stride, head_dim,
                        cache + kv_head * head_dim * BYTES, 2 * num_kv_heads * head_dim,
                        tables + row * table_width * BYTES, block_size,
                        context - (end - query), window, scale, softcap, target, num_heads * head_dim,
                        query == first and head == kv_head * group,
                    )  # fmt: skip


@entry(17, 2)
def _run(
    pool, threads, task, q, q_stride, cache, tables, table_width, starts, lengths, num_rows, out,
    num_heads, num_kv_heads, head_dim, block_size, window, scale, softcap,
):  # fmt: skip
    run(
        pool, threads, task,
        (q, q_stride, cache, tables, table_width, starts, lengths, num_rows, out,
         num_heads, num_kv_heads, head_dim, block_size, window, scale, softcap),
    )  # fmt: skip


_attend = Launch(_run, _attend_rows, num_rows_at=7, num_floats=2)


def paged_decode(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: None = None,  # the signature of implementations with a workspace
) -> torch.Tensor:
    """Attention of the newest queries of each request.

    q: [B, H, D], kv_cache: [N, P, 2, K, D] float32, block_tables: [B, M] int32, context_lens: [B] int32, 0 for no row →
    [B, H, D]
    """
    return _attention(q, kv_cache, block_tables, context_lens, shape, None, out)


def paged_prefill(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    max_query_len: int,
    any_lengths: bool = False,  # the signature of implementations for which it matters
    kv_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: None = None,  # the signature of implementations with a workspace
) -> torch.Tensor:
    """Causal attention of consecutive queries of each request.

    q: [T, H, D], query_starts: [B + 1] int32; the last query of a row sees context_lens[b] tokens, each one before it one
    less → [T, H, D]
    """
    return _attention(q, kv_cache, block_tables, context_lens, shape, query_starts, out)


def _attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    query_starts: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    assert kv_cache.dtype is torch.float32, "a cache in other formats is gathered and decoded"
    num_heads, head_dim = shape.num_heads, shape.head_dim
    attended = empty(q.shape[0], num_heads, head_dim) if out is None else out
    work = q.shape[0] * num_heads * head_dim * block_tables.shape[1] * shape.block_size
    _attend(
        work,
        q.data_ptr(),
        q.stride(0),
        kv_cache.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        0 if query_starts is None else query_starts.data_ptr(),
        context_lens.data_ptr(),
        context_lens.shape[0],
        attended.data_ptr(),
        num_heads,
        shape.num_kv_heads,
        head_dim,
        shape.block_size,
        shape.sliding_window or 0,
        shape.product_scale,
        shape.softcap or 0.0,
    )
    return attended
