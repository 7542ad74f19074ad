"""Split-KV for chunked prefill: the keys of few queries are divided into splits, so that a short chunk after a long context
fills the card; and their merge.

Otherwise one program processes a tile's whole context. A step of 100 tokens has 32 tiles in Llama-3.1-8B, for 132
multiprocessors: there several programs share a tile, each with some keys, as in decodes (Flash-Decoding, arXiv 2311.01282).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.query_tiles import max_query_tiles, tile_key_range
from kernels.triton.attention.splits import MERGE_CHUNK, MERGE_WARPS, TABLES, DecodeWorkspace, merge_row, scheduled_requests
from kernels.triton.launching.card_properties import multiprocessors, power_of_two

SPLIT_KEYS = 512
"""The fewest keys of a split: four tiles of 128 keys, some 6 µs on an H200, where its prologue, its epilogue and the merge take
about 2."""
SPLIT_FROM = 4
"""A tile is split only if it has keys for this many splits: with fewer, launching the merge costs more than splitting saves."""
PARTIAL_RESULTS_MAX = 1 << 16
"""The most partial results, one per query, head and split, that a step writes: those of four tiles per multiprocessor of an
H200, 34 MB for heads of 128. `engine.memory.splits` counts them in the memory plan."""
FEW_REQUESTS = 32
"""Chunks of more requests have enough tiles, and would need another kernel variant to search the requests."""
SPLIT_OVERHEAD = 1 / 32
"""Time of a split's prologue and epilogue, as a fraction of that of an unsplit tile: two tiles of 128 keys of 8k."""
WAVES_MAX = 16
"""The most programs of a captured launch, as a multiple of those that fit the card at a time. A program without work takes
about a microsecond."""
SPLIT_TIME_RATIO_MAX = 0.85
"""Splitting must reduce the estimated time (`_fastest_splits`) to this fraction of the unsplit time; the estimate ignores the
merge."""
MERGE_PROGRAMS = 32
"""The most merging programs for each multiprocessor, which holds 16 to 25 at a time, by their registers: fewer would merge
many heads one after the other where a few queries are split."""
_SPLIT_FROM = tl.constexpr(SPLIT_FROM)


def max_tile_splits(
    shape: AttentionShape,
    num_rows: int,
    num_requests: int,
    max_blocks: int,
    tile: tuple[int, int],
    programs: int,
    *,
    any_lengths: bool = False,
) -> int:
    """The most splits of a tile's keys; 1 if none is split. tile: rows and keys; programs: as many as fit the card at a time.
    `any_lengths`: `num_rows` and `num_requests` are upper limits. Then there are as many splits as there is memory for, so that
    a single short chunk is split too, and up to WAVES_MAX waves of programs, most of which may be idle.

    `max_blocks` and the window bound the result only by what no tile exceeds anyway (`plan_tile_splits`), so they do not change
    any tile's splits."""
    rows, keys = tile
    queries = rows // shape.group
    num_tokens = max_blocks * shape.block_size
    if shape.sliding_window is not None:
        num_tokens = min(num_tokens, shape.sliding_window + queries + keys)
    if num_requests > FEW_REQUESTS or num_tokens < SPLIT_FROM * SPLIT_KEYS:
        return 1
    num_tiles = max_query_tiles(num_rows, num_requests, queries) * shape.num_kv_heads
    splits_max = min(programs, PARTIAL_RESULTS_MAX // (num_rows * shape.num_heads))
    splits = (
        min(splits_max, WAVES_MAX * programs // num_tiles) if any_lengths else _fastest_splits(num_tiles, programs, splits_max)
    )
    return max(1, min(splits, num_tokens // SPLIT_KEYS))


@lru_cache(maxsize=4096)
def _fastest_splits(num_tiles: int, programs: int, splits_max: int) -> int:
    """The number of splits, at most `splits_max`, that minimises the time of `num_tiles` equal tiles if `programs` run at a
    time; 1 if splitting saves too little."""

    def estimated_time(splits: int) -> float:
        return -(-num_tiles * splits // programs) * (1 / splits + SPLIT_OVERHEAD)

    best = min(range(1, max(1, splits_max) + 1), key=estimated_time)
    return best if estimated_time(best) < SPLIT_TIME_RATIO_MAX * estimated_time(1) else 1


@triton.jit
def plan_tile_splits(begin, newest, max_splits, KEYS, SPLIT: tl.constexpr):
    """→ tiles of keys per split and number of splits of a query tile that attends to keys begin … newest, from their number and
    `max_splits` alone. Splits have equal numbers of tiles; only the last may be shorter."""
    num_tokens = newest + 1 - begin
    num_splits = tl.where(num_tokens < _SPLIT_FROM * SPLIT, 1, tl.minimum(num_tokens // SPLIT, max_splits))
    tiles = (num_tokens + num_splits * KEYS - 1) // (num_splits * KEYS)
    return tiles, (num_tokens + tiles * KEYS - 1) // (tiles * KEYS)


@triton.jit(
    do_not_specialize=["num_requests", "max_splits", "queries", "window", "keys"], do_not_specialize_on_alignment=TABLES[1:]
)
def merge_chunks_kernel(
    context_lens,
    query_starts,
    out,
    partial_out,
    partial_lse,
    num_requests,
    max_splits,
    queries,
    window,
    keys,
    H: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merges the splits of one query, for every num_programs(1)-th head, as `splits.merge_kernel`. An unsplit tile
    has already been written to `out`. queries and keys: of a tile; window: 0 is none. They are not constants, so that there is
    one variant per head size."""
    token_row = tl.program_id(0)
    index = tl.arange(0, REQUESTS)
    ends = tl.load(query_starts + index + 1, mask=index < num_requests, other=token_row + 1)
    request = tl.sum((ends <= token_row).to(tl.int32), 0)
    first_row = tl.load(query_starts + request)
    if token_row < first_row:  # before the first request: an unused row
        return
    num_queries = tl.load(query_starts + request + 1) - first_row
    first_query = (token_row - first_row) // queries * queries
    start = tl.load(context_lens + request) - num_queries
    begin, _, newest = tile_key_range(start, first_query, num_queries, queries, window, keys)
    _, num_splits = plan_tile_splits(begin, newest, max_splits, keys, SPLIT)
    if num_splits > 1:
        for head in range(tl.program_id(1), H, tl.num_programs(1)):
            merge_row(out, partial_out, partial_lse, token_row, head, num_splits, max_splits, H, D, WIDTH, CHUNK)


def merge_chunks(
    partials: DecodeWorkspace,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    tile: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """out[i, h] = Σ 2^lse[i, s, h] · partial[i, s, h] / Σ 2^lse[i, s, h] over the splits s of the tile of row i, in their order
    (arXiv 2311.01282). Rows of tiles that are not split are left as they are.

    partials: [T, S, H, D] and [T, S, H] float32; query_starts: [B + 1] int32; context_lens: [B] int32; tile: its rows
    and keys; out: [T, H, D]. Bytes: 4 · (D + 1) per split, row and head, and the row of `out`; 2 · D operations per split, in
    float32. Splits beyond a tile's own are not read."""
    rows, keys = tile
    num_requests, queries = context_lens.shape[0], rows // shape.group
    num_rows = out.shape[0]
    merge_chunks_kernel[num_rows, _merging_programs(num_rows, shape.num_heads, multiprocessors(out.device))](
        context_lens, query_starts, out, *partials,
        num_requests, partials.partial_out.shape[1], queries, shape.sliding_window or 0, keys,
        **merge_constants(shape), REQUESTS=scheduled_requests(num_requests), CHUNK=MERGE_CHUNK, num_warps=MERGE_WARPS,
    )  # fmt: skip


def _merging_programs(num_rows: int, num_heads: int, multiprocessors: int) -> int:
    """Programs per query, each for some of its heads: only as many as the card holds at a time or twice, because most queries
    of most steps are not split, and their programs do nothing but start and end."""
    return max(1, min(num_heads, MERGE_PROGRAMS * multiprocessors // num_rows))


def merge_constants(shape: AttentionShape) -> dict[str, object]:
    """Constants of `merge_chunks_kernel`, except REQUESTS and CHUNK."""
    size = shape.head_dim
    return {"H": shape.num_heads, "D": size, "WIDTH": power_of_two(size), "SPLIT": SPLIT_KEYS}
