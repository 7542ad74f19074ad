"""Paged causal attention of long chunks on Hopper by three groups of warps: one loads, two alternate products and exponentials.

In `attention_prefill_hopper` all warps run in step: they wait for keys together, multiply together and exponentiate together,
leaving the tensor cores idle meanwhile. Here no warp waits for all the others. Four warps load pages, tile after tile, as soon
as a stage is free; two groups of four warps hold 64 rows each and go through the tiles at their own pace: while one computes
exponentials, the other's products are under way (FlashAttention-3, arXiv 2407.08608). Barriers in shared memory (mbarrier)
signal what is loaded and what is free: two for each stage of a tile of keys, and one for each stage of values.

    tensor cores │ rows 0-63: Q·Kᵀ, weights·V │ rows 64-127: Q·Kᵀ, weights·V │ rows 0-63 …
    rows 0-63    │                            │ exponentials                 │
    rows 64-127  │ exponentials               │                              │ exponentials

Not in service: a candidate of `bench.gpu.choices`, timed last because it may leave the device unusable. On a card it gave
correct results in twelve checks, then made an illegal memory access while it was timed. One cause has since been found by
executing its PTX, and is fixed: Triton 3.6 kept values of the warp groups in the memory of two barriers that were never used.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.attention_rows import AttentionShape
from kernels.triton import attention_prefill_hopper as hopper
from kernels.triton.attention_decode import score_factor
from kernels.triton.attention_prefill_hopper import copy_async
from kernels.triton.attention_splits import TABLES, DecodeWorkspace, scheduled_requests

NUM_WARPS = 4
"""Warps of the first group of rows, as the launch specifies them; Triton adds those of the other groups."""
CHOSEN = {"STAGES": 3, "LOADERS": 4, "GROUP_REGISTERS": 216, "LOADER_REGISTERS": 72}


@gluon.jit(do_not_specialize=["num_requests", "num_tiles", "table_stride"], do_not_specialize_on_alignment=TABLES)
def groups_kernel(
    q,
    kv_cache,
    block_tables,
    query_starts,
    context_lens,
    out,
    num_requests,
    num_tiles,
    scale,
    q_stride,
    block_stride,
    table_stride,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    REQUESTS: gl.constexpr,
    STAGES: gl.constexpr,
    LOADERS: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):
    """One tile of queries, for one key head."""
    GROUP: gl.constexpr = H // K
    QUERIES: gl.constexpr = ROWS // GROUP
    DTYPE: gl.constexpr = kv_cache.dtype.element_ty
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    LOADED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    ASKED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)

    kv_head = gl.program_id(0) % K
    query_tile = num_tiles - 1 - gl.program_id(0) // K
    each = gl.arange(0, REQUESTS, layout=EACH)
    first_tile = gl.load(query_starts + each, mask=each < num_requests, other=0) // QUERIES + each
    request = gl.sum(((first_tile <= query_tile) & (each < num_requests)).to(gl.int32), 0) - 1
    first_row = gl.load(query_starts + request)
    num_queries = gl.load(query_starts + request + 1) - first_row
    first = (query_tile - (first_row // QUERIES + request)) * QUERIES
    # The three groups begin and end in every program, also where there is nothing to do: `newest` is -1 there.
    is_work = first < num_queries
    # Positions of the queries: every key up to the first one's is seen by all of them, none behind `newest` by any.
    start = gl.load(context_lens + request) - num_queries
    newest = start + gl.minimum(first + QUERIES, num_queries) - 1
    table = block_tables + request.to(gl.int64) * table_stride
    num_whole = (start + first + 1) // KEYS

    queries = gl.allocate_shared_memory(DTYPE, [2, 64, D], ASKED)
    key_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], SHARED)
    value_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], SHARED)
    queries_there = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    keys_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_there = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    begun = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(queries_there.index(0), count=32 * LOADERS)
    for place in gl.static_range(STAGES):
        mbarrier.init(keys_there.index(place), count=32 * LOADERS)
        mbarrier.init(values_there.index(place), count=32 * LOADERS)
        mbarrier.init(begun.index(place), count=2)
    # In front of the first tile stands one that weighs nothing.
    value_tiles.index(STAGES - 1).store(gl.zeros([KEYS, D], DTYPE, LOADED))
    fence_async_shared()
    gl.thread_barrier()

    newest = gl.where(is_work, newest, -1)
    shared = (queries, key_tiles, value_tiles, queries_there, keys_there, values_there, begun)
    places = (q, kv_cache, table, out)
    sizes = (kv_head, first_row, num_queries, first, start, newest, num_whole)
    numbers = (scale, q_stride, block_stride)
    gl.warp_specialize(
        [
            (_attend, (shared, places, sizes, numbers, 0, H, K, D, ROWS, KEYS, STAGES)),
            (_attend, (shared, places, sizes, numbers, 1, H, K, D, ROWS, KEYS, STAGES)),
            (_load, (shared, places, sizes, numbers, H, K, D, P, ROWS, KEYS, STAGES, LOADERS)),
        ],
        [4, LOADERS],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _load(
    shared,
    places,
    sizes,
    numbers,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    LOADERS: gl.constexpr,
):
    """Loads queries, and tiles of keys and of values one after the other, zeros behind the newest token."""
    queries, key_tiles, value_tiles, queries_there, keys_there, values_there, begun = shared
    q, kv_cache, table, _out = places
    kv_head, first_row, num_queries, first, _start, newest, _num_whole = sizes
    _scale, q_stride, block_stride = numbers
    if newest >= 0:
        GROUP: gl.constexpr = H // K
        ASKED: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [LOADERS, 1], [1, 0])
        lane = gl.arange(0, D, layout=gl.SliceLayout(0, ASKED))
        for part in gl.static_range(2):
            half, live = _half_places(
                kv_head, first_row, num_queries, first, q_stride, D, GROUP, ROWS, part, gl.SliceLayout(1, ASKED)
            )
            copy_async(queries.index(part), q + half[:, None] + lane[None, :], mask=live[:, None])
        async_copy.mbarrier_arrive(queries_there.index(0), increment_count=False)

        # A warp loads tokens that follow one another, so that a thread needs few numbers of blocks.
        LOADED: gl.constexpr = _loaded_layout(KEYS, D, LOADERS)
        PAGED: gl.constexpr = _paged_layout(KEYS, D, LOADERS, P)
        TOKENS: gl.constexpr = gl.SliceLayout(1, LOADED)
        page = gl.arange(0, KEYS // P, layout=gl.SliceLayout(1, PAGED))
        within = gl.arange(0, P, layout=gl.SliceLayout(0, PAGED)) * (2 * K * D)
        column = gl.arange(0, KEYS, layout=TOKENS)
        lane = gl.arange(0, D, layout=gl.SliceLayout(0, LOADED))
        keys = kv_cache + kv_head * D
        last = newest // KEYS
        block = gl.load(table + page, mask=page * P <= newest, other=0)
        for MASKED in gl.static_range(2):
            begin = last if MASKED else 0
            for tile in range(begin, last + MASKED):
                stage = tile % STAGES
                place = (block.to(gl.int64) * block_stride)[:, None] + within[None, :]
                place = gl.multiple_of(gl.convert_layout(gl.reshape(place, [KEYS]), TOKENS), 8)
                key_places = keys + place[:, None] + lane[None, :]
                held = (tile * KEYS + column <= newest)[:, None]
                if not MASKED:
                    ahead = (tile + 1) * (KEYS // P) + page
                    block = gl.load(table + ahead, mask=ahead * P <= newest, other=0)
                # Where tile - STAGES was, when both groups have begun the tile behind that: its keys are read then.
                after = tile - STAGES + 1
                mbarrier.wait(begun.index((after + STAGES) % STAGES), after // STAGES & 1, pred=after > 0)
                if MASKED:
                    copy_async(key_tiles.index(stage), key_places, mask=held)
                else:
                    copy_async(key_tiles.index(stage), key_places)
                async_copy.mbarrier_arrive(keys_there.index(stage), increment_count=False)
                # Its values are read when the next but one is begun; the last place held zeros in front of the first tile.
                mbarrier.wait(begun.index((after + 1 + STAGES) % STAGES), (after + 1) // STAGES & 1, pred=after + 1 > 0)
                if MASKED:
                    copy_async(value_tiles.index(stage), key_places + K * D, mask=held)
                else:
                    copy_async(value_tiles.index(stage), key_places + K * D)
                async_copy.mbarrier_arrive(values_there.index(stage), increment_count=False)
        # Nothing is under way to shared memory when the program ends.
        async_copy.commit_group()
        async_copy.wait_group(0)


@gluon.constexpr_function
def _loaded_layout(KEYS: int, D: int, LOADERS: int) -> gl.constexpr:
    """[KEYS, D]: 16 bytes a thread, whole rows by threads side by side, each warp rows that follow one another."""
    across = D.bit_length() - 4  # bits of the lane that go along a row
    down = [[1 << bit, 0] for bit in range(KEYS.bit_length() - 1)]
    lanes = [[0, 8 << bit] for bit in range(across)] + down[: 5 - across]
    warps = LOADERS.bit_length() - 1
    registers = [[0, 1], [0, 2], [0, 4], *down[5 - across : len(down) - warps]]
    return gl.DistributedLinearLayout(registers, lanes, down[len(down) - warps :], [], [KEYS, D])


@gluon.constexpr_function
def _paged_layout(KEYS: int, D: int, LOADERS: int, P: int) -> gl.constexpr:
    """[KEYS // P, P]: the rows of `_loaded_layout` by block and place in it."""
    across = D.bit_length() - 4
    down = [[0, 1 << bit] if 1 << bit < P else [(1 << bit) // P, 0] for bit in range(KEYS.bit_length() - 1)]
    lanes = [*[[0, 0]] * across, *down[: 5 - across]]
    warps = LOADERS.bit_length() - 1
    return gl.DistributedLinearLayout(
        down[5 - across : len(down) - warps], lanes, down[len(down) - warps :], [], [KEYS // P, P]
    )


@gluon.jit
def _attend(
    shared,
    places,
    sizes,
    numbers,
    PART: gl.constexpr,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """64 rows over all tiles, and writes what was found."""
    queries, key_tiles, value_tiles, queries_there, keys_there, values_there, begun = shared
    _q, kv_cache, _table, out = places
    kv_head, first_row, num_queries, first, start, newest, num_whole = sizes
    scale, _q_stride, _block_stride = numbers
    GROUP: gl.constexpr = H // K
    DTYPE: gl.constexpr = kv_cache.dtype.element_ty
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    FOUND: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, FOUND, 2)
    row = 64 * PART + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    if newest >= 0:
        position = start + first + row // GROUP
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        weight = gl.zeros([64, KEYS], DTYPE, WEIGHTS)
        largest = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
        found = gl.zeros([64, D], gl.float32, FOUND)
        nothing = gl.zeros([64, KEYS], gl.float32, SCORES)
        asked = queries.index(PART)
        mbarrier.wait(queries_there.index(0), 0)
        mbarrier.wait(keys_there.index(0), 0)
        for MASKED in gl.static_range(2):
            begin = num_whole if MASKED else 0
            end = newest // KEYS + 1 if MASKED else num_whole
            for tile in range(begin, end):
                stage, before = tile % STAGES, (tile + STAGES - 1) % STAGES
                mbarrier.wait(values_there.index(before), (tile - 1) // STAGES & 1, pred=tile > 0)
                fence_async_shared()
                score = warpgroup_mma(asked, key_tiles.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                found = warpgroup_mma(weight, value_tiles.index(before), found, is_async=True)
                mbarrier.arrive(begun.index(stage))
                score = warpgroup_mma_wait(1, deps=[score])
                if MASKED:
                    score = gl.where((tile * KEYS + column)[None, :] <= position[:, None], score, float("-inf"))
                larger = gl.maximum(largest, gl.max(score, 1) * scale)
                power = gl.exp2(score * scale - larger[:, None])
                faded = gl.exp2(largest - larger)
                total = total * faded + gl.sum(power, 1)
                largest = larger
                rounded = gl.convert_layout(power.to(DTYPE), WEIGHTS)
                faded = gl.convert_layout(faded, gl.SliceLayout(1, FOUND))
                # Waited for here, in code that the assembler does not move: it took the next wait in front of exponentials.
                mbarrier.wait(keys_there.index((tile + 1) % STAGES), (tile + 1) // STAGES & 1, pred=tile < newest // KEYS)
                found, _ = warpgroup_mma_wait(0, deps=[found, weight])
                found = found * faded[:, None]
                weight = rounded
        last = newest // KEYS
        mbarrier.wait(values_there.index(last % STAGES), last // STAGES & 1)
        fence_async_shared()
        found = warpgroup_mma(weight, value_tiles.index(last % STAGES), found)

        found = found / gl.convert_layout(total, gl.SliceLayout(1, FOUND))[:, None]
        lane = gl.arange(0, D, layout=gl.SliceLayout(0, FOUND))
        rows, live = _half_places(kv_head, first_row, num_queries, first, H * D, D, GROUP, ROWS, PART, gl.SliceLayout(1, FOUND))
        gl.store(out + rows[:, None] + lane[None, :], found.to(DTYPE), mask=live[:, None])


@gluon.jit
def _half_places(
    kv_head,
    first_row,
    num_queries,
    first,
    stride,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    PART: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """As `_row_places`, of 64 of the rows: [64]."""
    row = 64 * PART + gl.arange(0, 64, layout=LAYOUT)
    query, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    live = (row < ROWS // GROUP * GROUP) & (query < num_queries)
    return (first_row + query).to(gl.int64) * stride + head * D, live


def prefill_by_groups(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    num_tiles: int,
    out: torch.Tensor,
    parts: DecodeWorkspace | None,
) -> None:
    """As `attention_prefill_hopper.overlapped_prefill`, for tiles whose keys are not split."""
    assert parts is None, "this kernel knows no splits"
    num_requests, sizes = block_tables.shape[0], hopper.overlapped_constants(shape)
    del sizes["SPLIT"]
    groups_kernel[(num_tiles * shape.num_kv_heads,)](
        q, kv_cache, block_tables, query_starts, context_lens, out,
        num_requests, num_tiles, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0),
        **sizes, **CHOSEN, REQUESTS=scheduled_requests(num_requests), num_warps=NUM_WARPS,
    )  # fmt: skip
