"""How the keys of few queries are cut into splits, so that a short chunk after a long context fills the card, and the merge.

Otherwise one program processes a tile's whole context. A step of 100 tokens has 32 tiles in Llama-3.1-8B, for 132
multiprocessors: there several programs share a tile, each with some keys, as in decodes (Flash-Decoding, arXiv 2311.01282).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.attention_splits import MERGE_CHUNK, MERGE_WARPS, TABLES, DecodeWorkspace, merge_row, scheduled_requests
from kernels.triton.query_tiles import tile_keys
from kernels.triton.tuning import power_of_two

SPLIT_KEYS = 512
"""The least keys of a split: four tiles of 128 keys, some 6 µs on an H200, where its beginning, its end and the merge take
about 2."""
SPLIT_FROM = 4
"""A tile is split only if it has keys for this many splits: with fewer, launching the merge costs more than it saves."""
PARTS_MAX = 1 << 16
"""The most results, one per query, head and split, that a step writes: those of four tiles per multiprocessor of an H200, 34 MB
for heads of 128. `engine.memory.splits` plans for them."""
FEW_REQUESTS = 32
"""Chunks of more requests are enough tiles, and need another variant of the kernels to search among them."""
BEGIN_AND_END = 1 / 32
"""Time of a split besides its keys, as a part of that of a whole tile: two tiles of 128 keys of 8k."""
WAVES_MAX = 16
"""The most programs of a captured launch, as a multiple of those that the card holds at a time. A program without work takes
about a microsecond."""
WORTH = 0.85
"""Splitting must reduce the time, by `_fewest_waves`, to this share of the time without; the formula ignores the merge."""
_FROM = tl.constexpr(SPLIT_FROM)


def chunk_splits(
    shape: AttentionShape,
    num_rows: int,
    num_requests: int,
    max_blocks: int,
    tile: tuple[int, int],
    programs: int,
    *,
    any_lengths: bool = False,
) -> int:
    """The largest number of splits into which a tile's keys are cut; 1 if they are not cut. tile: rows and keys; programs: how
    many the card holds at a time. `any_lengths`: rows and requests are the most that there may be. Then there are as many
    splits as there is memory for, so that a short chunk by itself is divided too, and no more programs than WAVES_MAX allows,
    most of which may have nothing to do.

    `max_blocks` and the window limit the result only to what no tile exceeds anyway (`splits_of_tile`), so they change no
    tile's splits."""
    rows, keys = tile
    queries = rows // shape.group
    num_tokens = max_blocks * shape.block_size
    if shape.sliding_window is not None:
        num_tokens = min(num_tokens, shape.sliding_window + queries + keys)
    if num_requests > FEW_REQUESTS or num_tokens < SPLIT_FROM * SPLIT_KEYS:
        return 1
    num_tiles = (num_rows // queries + num_requests) * shape.num_kv_heads
    most = min(programs, PARTS_MAX // (num_rows * shape.num_heads))
    wanted = min(most, WAVES_MAX * programs // num_tiles) if any_lengths else _fewest_waves(num_tiles, programs, most)
    return max(1, min(wanted, num_tokens // SPLIT_KEYS))


@lru_cache(maxsize=4096)
def _fewest_waves(num_tiles: int, programs: int, most: int) -> int:
    """The number of splits, at most `most`, with which `num_tiles` equal tiles take least time if `programs` run at a time."""

    def taken(splits: int) -> float:
        return -(-num_tiles * splits // programs) * (1 / splits + BEGIN_AND_END)

    best = min(range(1, max(1, most) + 1), key=taken)
    return best if taken(best) < WORTH * taken(1) else 1


def chunk_parts(num_rows: int, splits: int, shape: AttentionShape, device: torch.device) -> DecodeWorkspace:
    """Memory for the results of `splits` splits of `num_rows` queries."""
    size = num_rows, splits, shape.num_heads
    return DecodeWorkspace(
        torch.empty(*size, shape.head_dim, dtype=torch.float32, device=device),
        torch.empty(size, dtype=torch.float32, device=device),
    )


@triton.jit
def splits_of_tile(begin, newest, max_splits, KEYS, SPLIT: tl.constexpr):
    """→ tiles of keys of a split and number of splits of a tile of queries that sees the keys from `begin` to `newest`, from
    their number and `max_splits` alone. Evenly, so that no split is a remainder of a few tokens."""
    num_tokens = newest + 1 - begin
    num_splits = tl.where(num_tokens < _FROM * SPLIT, 1, tl.minimum(num_tokens // SPLIT, max_splits))
    tiles = (num_tokens + num_splits * KEYS - 1) // (num_splits * KEYS)
    return tiles, (num_tokens + tiles * KEYS - 1) // (tiles * KEYS)


@triton.jit(
    do_not_specialize=["num_requests", "max_splits", "queries", "window", "keys"], do_not_specialize_on_alignment=TABLES[1:]
)
def merge_chunks_kernel(
    context_lens,
    query_starts,
    out,
    attended,
    log_weights,
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
    """One query and head, as `attention_splits.merge_kernel`; whoever had one split has written its result itself. queries and
    keys: of a tile; window: 0 is none. They are no constants, so that there is one variant for each size of heads."""
    token_row, head = tl.program_id(0), tl.program_id(1)
    index = tl.arange(0, REQUESTS)
    ends = tl.load(query_starts + index + 1, mask=index < num_requests, other=token_row + 1)
    request = tl.sum((ends <= token_row).to(tl.int32), 0)
    first_row = tl.load(query_starts + request)
    if token_row < first_row:  # of nobody, as `tile_owner` says
        return
    num_queries = tl.load(query_starts + request + 1) - first_row
    first = (token_row - first_row) // queries * queries
    start = tl.load(context_lens + request) - num_queries
    begin, _, newest = tile_keys(start, first, num_queries, queries, window, keys)
    _, num_splits = splits_of_tile(begin, newest, max_splits, keys, SPLIT)
    if num_splits > 1:
        merge_row(out, attended, log_weights, token_row, head, num_splits, max_splits, H, D, WIDTH, CHUNK)


def merge_chunks(
    parts: DecodeWorkspace,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    tile: tuple[int, int],
    out: torch.Tensor,
) -> None:
    """Merges the results of every tile's splits, in order, into the rows of `out`. tile: rows and keys."""
    rows, keys = tile
    num_requests, queries = context_lens.shape[0], rows // shape.group
    merge_chunks_kernel[out.shape[:2]](
        context_lens, query_starts, out, *parts,
        num_requests, parts.attended.shape[1], queries, shape.sliding_window or 0, keys,
        **merge_constants(shape), REQUESTS=scheduled_requests(num_requests), CHUNK=MERGE_CHUNK, num_warps=MERGE_WARPS,
    )  # fmt: skip


def merge_constants(shape: AttentionShape) -> dict[str, object]:
    """Constants of `merge_chunks_kernel`, except REQUESTS and CHUNK."""
    size = shape.head_dim
    return {"H": shape.num_heads, "D": size, "WIDTH": power_of_two(size), "SPLIT": SPLIT_KEYS}
