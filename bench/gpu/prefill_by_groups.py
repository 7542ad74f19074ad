"""Paged causal attention of long chunks on Hopper by three groups of warps: one loads, two alternate products and exponentials.

In `attention.prefill_hopper` all warps run in step: they wait for keys together, multiply together and exponentiate together,
leaving the tensor cores idle meanwhile. Here no warp waits for all the others. Four warps load pages, tile after tile, as soon
as a stage is free; two groups of four warps handle 64 rows each and process the tiles at their own pace: while one computes
exponentials, the other's products run (FlashAttention-3, arXiv 2407.08608). Barriers in shared memory (mbarrier) signal which
stages are loaded and which are free: two for each stage of a tile of keys, and one for each stage of values.

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
from kernels.triton.attention import prefill_hopper as hopper
from kernels.triton.attention.decode import score_factor
from kernels.triton.attention.prefill_hopper import copy_async
from kernels.triton.attention.splits import TABLES, DecodeWorkspace, scheduled_requests

# Triton renamed it after 3.6.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

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
    REQUEST_LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    SHARED_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, D], DTYPE)
    QUERY_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, D], DTYPE)

    kv_head = gl.program_id(0) % K
    query_tile = num_tiles - 1 - gl.program_id(0) // K
    index = gl.arange(0, REQUESTS, layout=REQUEST_LAYOUT)
    first_tile = gl.load(query_starts + index, mask=index < num_requests, other=0) // QUERIES + index
    request = gl.sum(((first_tile <= query_tile) & (index < num_requests)).to(gl.int32), 0) - 1
    first_row = gl.load(query_starts + request)
    num_queries = gl.load(query_starts + request + 1) - first_row
    first_query = (query_tile - (first_row // QUERIES + request)) * QUERIES
    # The three groups start and end in every program; in one without queries, `newest` is -1 and they do nothing.
    has_queries = first_query < num_queries
    # Keys up to the position of the first query are visible to all queries, keys after `newest` to none.
    start = gl.load(context_lens + request) - num_queries
    newest = start + gl.minimum(first_query + QUERIES, num_queries) - 1
    table = block_tables + request.to(gl.int64) * table_stride
    num_unmasked = (start + first_query + 1) // KEYS

    queries = gl.allocate_shared_memory(DTYPE, [2, 64, D], QUERY_LAYOUT)
    key_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], SHARED_LAYOUT)
    value_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, KEYS, D], SHARED_LAYOUT)
    queries_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    keys_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    values_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_started = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(queries_ready.index(0), count=32 * LOADERS)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_ready.index(stage), count=32 * LOADERS)
        mbarrier.init(values_ready.index(stage), count=32 * LOADERS)
        mbarrier.init(tile_started.index(stage), count=2)
    # The pipeline starts with an empty tile: values and weights of zero.
    value_tiles.index(STAGES - 1).store(gl.zeros([KEYS, D], DTYPE, LOAD_LAYOUT))
    fence_async_shared()
    thread_barrier()

    newest = gl.where(has_queries, newest, -1)
    shared = (queries, key_tiles, value_tiles, queries_ready, keys_ready, values_ready, tile_started)
    pointers = (q, kv_cache, table, out)
    sizes = (kv_head, first_row, num_queries, first_query, start, newest, num_unmasked)
    scalars = (scale, q_stride, block_stride)
    gl.warp_specialize(
        [
            (_attend, (shared, pointers, sizes, scalars, 0, H, K, D, ROWS, KEYS, STAGES)),
            (_attend, (shared, pointers, sizes, scalars, 1, H, K, D, ROWS, KEYS, STAGES)),
            (_load, (shared, pointers, sizes, scalars, H, K, D, P, ROWS, KEYS, STAGES, LOADERS)),
        ],
        [4, LOADERS],
        [GROUP_REGISTERS, LOADER_REGISTERS],
    )


@gluon.jit
def _load(
    shared,
    pointers,
    sizes,
    scalars,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    P: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    LOADERS: gl.constexpr,
):
    """Loads the queries, then tiles of keys and of values alternately, with zeros after the newest token."""
    queries, key_tiles, value_tiles, queries_ready, keys_ready, values_ready, tile_started = shared
    q, kv_cache, table, _out = pointers
    kv_head, first_row, num_queries, first_query, _start, newest, _num_unmasked = sizes
    _scale, q_stride, block_stride = scalars
    if newest >= 0:
        GROUP: gl.constexpr = H // K
        QUERY_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [LOADERS, 1], [1, 0])
        lane = gl.arange(0, D, layout=gl.SliceLayout(0, QUERY_LAYOUT))
        for part in gl.static_range(2):
            offsets, row_mask = _half_offsets(
                kv_head, first_row, num_queries, first_query, q_stride, D, GROUP, ROWS, part, gl.SliceLayout(1, QUERY_LAYOUT)
            )
            copy_async(queries.index(part), q + offsets[:, None] + lane[None, :], mask=row_mask[:, None])
        async_copy.mbarrier_arrive(queries_ready.index(0), increment_count=False)

        # A warp loads consecutive tokens, so that a thread needs few block numbers.
        LOAD_LAYOUT: gl.constexpr = _load_layout(KEYS, D, LOADERS)
        PAGE_LAYOUT: gl.constexpr = _page_layout(KEYS, D, LOADERS, P)
        TOKEN_LAYOUT: gl.constexpr = gl.SliceLayout(1, LOAD_LAYOUT)
        page = gl.arange(0, KEYS // P, layout=gl.SliceLayout(1, PAGE_LAYOUT))
        page_offset = gl.arange(0, P, layout=gl.SliceLayout(0, PAGE_LAYOUT)) * (2 * K * D)
        column = gl.arange(0, KEYS, layout=TOKEN_LAYOUT)
        lane = gl.arange(0, D, layout=gl.SliceLayout(0, LOAD_LAYOUT))
        keys = kv_cache + kv_head * D
        last = newest // KEYS
        block = gl.load(table + page, mask=page * P <= newest, other=0)
        for MASKED in gl.static_range(2):
            begin = last if MASKED else 0
            for tile in range(begin, last + MASKED):
                stage = tile % STAGES
                token_offsets = (block.to(gl.int64) * block_stride)[:, None] + page_offset[None, :]
                token_offsets = gl.multiple_of(gl.convert_layout(gl.reshape(token_offsets, [KEYS]), TOKEN_LAYOUT), 8)
                key_pointers = keys + token_offsets[:, None] + lane[None, :]
                token_mask = (tile * KEYS + column <= newest)[:, None]
                if not MASKED:
                    next_page = (tile + 1) * (KEYS // P) + page
                    block = gl.load(table + next_page, mask=next_page * P <= newest, other=0)
                # This stage held the keys of tile - STAGES, which have been read once both groups have started the next tile.
                read_tile = tile - STAGES + 1
                mbarrier.wait(tile_started.index((read_tile + STAGES) % STAGES), read_tile // STAGES & 1, pred=read_tile > 0)
                if MASKED:
                    copy_async(key_tiles.index(stage), key_pointers, mask=token_mask)
                else:
                    copy_async(key_tiles.index(stage), key_pointers)
                async_copy.mbarrier_arrive(keys_ready.index(stage), increment_count=False)
                # Its values have been read one tile later. The last stage held the zeros of the empty tile.
                mbarrier.wait(
                    tile_started.index((read_tile + 1 + STAGES) % STAGES), (read_tile + 1) // STAGES & 1, pred=read_tile + 1 > 0
                )
                if MASKED:
                    copy_async(value_tiles.index(stage), key_pointers + K * D, mask=token_mask)
                else:
                    copy_async(value_tiles.index(stage), key_pointers + K * D)
                async_copy.mbarrier_arrive(values_ready.index(stage), increment_count=False)
        # No copy to shared memory may be pending when the program ends.
        async_copy.commit_group()
        async_copy.wait_group(0)


@gluon.constexpr_function
def _load_layout(KEYS: int, D: int, LOADERS: int) -> gl.constexpr:
    """[KEYS, D]: 16 bytes per thread, whole rows by adjacent threads, consecutive rows by each warp."""
    across = D.bit_length() - 4  # bits of the lane that count along a row
    down = [[1 << bit, 0] for bit in range(KEYS.bit_length() - 1)]
    lanes = [[0, 8 << bit] for bit in range(across)] + down[: 5 - across]
    warps = LOADERS.bit_length() - 1
    registers = [[0, 1], [0, 2], [0, 4], *down[5 - across : len(down) - warps]]
    return gl.DistributedLinearLayout(registers, lanes, down[len(down) - warps :], [], [KEYS, D])


@gluon.constexpr_function
def _page_layout(KEYS: int, D: int, LOADERS: int, P: int) -> gl.constexpr:
    """[KEYS // P, P]: the rows of `_load_layout`, by block and position within the block."""
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
    pointers,
    sizes,
    scalars,
    PART: gl.constexpr,
    H: gl.constexpr,
    K: gl.constexpr,
    D: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Computes attention of 64 rows over all tiles, and stores it."""
    queries, key_tiles, value_tiles, queries_ready, keys_ready, values_ready, tile_started = shared
    _q, kv_cache, _table, out = pointers
    kv_head, first_row, num_queries, first_query, start, newest, num_unmasked = sizes
    scale, _q_stride, _block_stride = scalars
    GROUP: gl.constexpr = H // K
    DTYPE: gl.constexpr = kv_cache.dtype.element_ty
    SCORE_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    WEIGHT_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, ACC_LAYOUT, 2)
    row = 64 * PART + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORE_LAYOUT))
    if newest >= 0:
        position = start + first_query + row // GROUP
        column = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORE_LAYOUT))
        previous_weight = gl.zeros([64, KEYS], DTYPE, WEIGHT_LAYOUT)
        row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
        row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
        acc = gl.zeros([64, D], gl.float32, ACC_LAYOUT)
        zeros = gl.zeros([64, KEYS], gl.float32, SCORE_LAYOUT)
        query_tile = queries.index(PART)
        mbarrier.wait(queries_ready.index(0), 0)
        mbarrier.wait(keys_ready.index(0), 0)
        for MASKED in gl.static_range(2):
            begin = num_unmasked if MASKED else 0
            end = newest // KEYS + 1 if MASKED else num_unmasked
            for tile in range(begin, end):
                stage, previous = tile % STAGES, (tile + STAGES - 1) % STAGES
                mbarrier.wait(values_ready.index(previous), (tile - 1) // STAGES & 1, pred=tile > 0)
                fence_async_shared()
                score = warpgroup_mma(query_tile, key_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                acc = warpgroup_mma(previous_weight, value_tiles.index(previous), acc, is_async=True)
                mbarrier.arrive(tile_started.index(stage))
                score = warpgroup_mma_wait(1, deps=[score])
                if MASKED:
                    score = gl.where((tile * KEYS + column)[None, :] <= position[:, None], score, float("-inf"))
                new_max = gl.maximum(row_max, gl.max(score, 1) * scale)
                weight = gl.exp2(score * scale - new_max[:, None])
                rescale = gl.exp2(row_max - new_max)
                row_sum = row_sum * rescale + gl.sum(weight, 1)
                row_max = new_max
                weight_operand = gl.convert_layout(weight.to(DTYPE), WEIGHT_LAYOUT)
                rescale = gl.convert_layout(rescale, gl.SliceLayout(1, ACC_LAYOUT))
                # This wait is here because the assembler does not move it; it moved the next wait before the exponentials.
                mbarrier.wait(keys_ready.index((tile + 1) % STAGES), (tile + 1) // STAGES & 1, pred=tile < newest // KEYS)
                acc, _ = warpgroup_mma_wait(0, deps=[acc, previous_weight])
                acc = acc * rescale[:, None]
                previous_weight = weight_operand
        last = newest // KEYS
        mbarrier.wait(values_ready.index(last % STAGES), last // STAGES & 1)
        fence_async_shared()
        acc = warpgroup_mma(previous_weight, value_tiles.index(last % STAGES), acc)

        acc = acc / gl.convert_layout(row_sum, gl.SliceLayout(1, ACC_LAYOUT))[:, None]
        lane = gl.arange(0, D, layout=gl.SliceLayout(0, ACC_LAYOUT))
        offsets, row_mask = _half_offsets(
            kv_head, first_row, num_queries, first_query, H * D, D, GROUP, ROWS, PART, gl.SliceLayout(1, ACC_LAYOUT)
        )
        gl.store(out + offsets[:, None] + lane[None, :], acc.to(DTYPE), mask=row_mask[:, None])


@gluon.jit
def _half_offsets(
    kv_head,
    first_row,
    num_queries,
    first_query,
    stride,
    D: gl.constexpr,
    GROUP: gl.constexpr,
    ROWS: gl.constexpr,
    PART: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """As `_row_offsets` of `attention.prefill_hopper`, for 64 of the rows: [64] each."""
    row = 64 * PART + gl.arange(0, 64, layout=LAYOUT)
    query, head = first_query + row // GROUP, kv_head * GROUP + row % GROUP
    row_mask = (row < ROWS // GROUP * GROUP) & (query < num_queries)
    return (first_row + query).to(gl.int64) * stride + head * D, row_mask


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
    """As `prefill_hopper.overlapped_prefill`, for tiles whose keys are not split."""
    assert parts is None, "this kernel does not support splits"
    num_requests, sizes = block_tables.shape[0], hopper.overlapped_constants(shape)
    del sizes["SPLIT"]
    groups_kernel[(num_tiles * shape.num_kv_heads,)](
        q, kv_cache, block_tables, query_starts, context_lens, out,
        num_requests, num_tiles, score_factor(shape), q.stride(0), kv_cache.stride(0), block_tables.stride(0),
        **sizes, **CHOSEN, REQUESTS=scheduled_requests(num_requests), num_warps=NUM_WARPS,
    )  # fmt: skip
