"""The decode of a single request: rotation, cache write, attention and the merge of its splits in one launch.

With a single request, latency is not hidden: attention in a layer of Llama-3.1-8B reads 4 MB, a microsecond of an H200's memory
bandwidth, and took 13 µs in two launches (docs/log/gpu-kernels.md), most of it in dependent loads. Here every tile of keys has
its own program, as far as they fit the card at a time; lengths, blocks and the first tile are loaded before the wait for the
projection, and the last program to finish merges the splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.decode import score_factor
from kernels.triton.attention.newest_token import Rotation, load_angles, load_newest, rotate_and_store_newest, scaled_score
from kernels.triton.attention.splits import shape_constants
from kernels.triton.launching.card_properties import multiprocessors, power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.products.split_k import arrival_counters

TILE_ELEMENTS, MERGE_ELEMENTS = 8192, 8192
"""Elements of a tile of keys, and elements of partial results merged at a time: 64 per thread."""
RESIDENT_WARPS = 8
"""Per multiprocessor, as two programs of four: while one computes, 32 KiB of the other's keys and values are in flight."""


@triton.jit(do_not_specialize=["max_splits"])
def lone_kernel(
    qkv, kv_cache, block_table, context_lens, kv_scales, cos, sin, slot_mapping, q_weight, k_weight, out, partial_out,
    partial_lse, arrivals, scale, block_stride, max_splits, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program i: KV head i % K, split i // K if there are so many. The last split attends to the newest token and stores it."""
    kv_head, split = tl.program_id(0) % K, tl.program_id(0) // K
    GROUP: tl.constexpr = H // K
    DOT: tl.constexpr = tl.float16 if kv_cache.dtype.element_ty.primitive_bitwidth == 8 else kv_cache.dtype.element_ty
    row, lane, column = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    head = kv_head * GROUP + row % GROUP
    # Nothing that is loaded before the wait is written by the preceding kernel.
    context_len = tl.load(context_lens, eviction_policy="evict_last")
    first_token = context_len * 0
    if WINDOW > 0:
        first_token = tl.maximum(context_len - WINDOW, 0) // TILE * TILE
    num_tiles = tl.cdiv(context_len - first_token, TILE)
    tiles = tl.cdiv(num_tiles, max_splits)
    num_splits = tl.maximum(tl.cdiv(num_tiles, tl.maximum(tiles, 1)), 1)
    begin = first_token + split * tiles * TILE
    newest, oldest = context_len - 1, context_len - (WINDOW if WINDOW > 0 else context_len)
    end = tl.minimum(begin + tiles * TILE, newest)  # of the cached tokens
    is_last = split + 1 == num_splits
    keys = kv_cache + kv_head * D
    block = _load_blocks(block_table, begin, end, column, P)
    key, value = _load_tile(keys, block, begin, end, oldest, column, lane, block_stride, K, D, P, TILE)
    block = _load_blocks(block_table, begin + TILE, end, column, P)
    value_scale = 1.0
    if kv_scales is not None:
        scale *= tl.load(kv_scales, eviction_policy="evict_last")
        value_scale = tl.load(kv_scales + 1, eviction_policy="evict_last")
    request, is_valid = split * 0, split < num_splits
    angles = load_angles(cos, sin, slot_mapping, request, is_valid, is_last, lane, ROTARY)
    wait_for_previous(EARLY)
    if is_valid:
        operands = load_newest(qkv, request, is_valid, is_last, head, row < GROUP, kv_head, lane, 0, H, K, D, ROTARY)
        queries, newest_key, newest_value = rotate_and_store_newest(
            operands, angles, q_weight, k_weight, kv_cache, kv_scales, kv_head, lane, block_stride, eps, K, D, P, ROTARY
        )
        queries = queries.to(DOT)
        acc = tl.zeros([ROWS, WIDTH], tl.float32)
        weight_sums = tl.zeros([ROWS, TILE], tl.float32)
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        for start in range(begin, end + is_last.to(tl.int32), TILE):
            token = start + column
            if start + TILE > newest:
                is_newest = (token == newest)[:, None]
                key, value = tl.where(is_newest, newest_key, key), tl.where(is_newest, newest_value, value)
            score = scaled_score(tl.dot(queries, tl.trans(key.to(DOT)), input_precision="ieee"), scale, SOFTCAP)
            # Registers suffice for three tiles, not for four.
            next_key, next_value = _load_tile(keys, block, start + TILE, end, oldest, column, lane, block_stride, K, D, P, TILE)
            block = _load_blocks(block_table, start + 2 * TILE, end, column, P)
            visible = ((token < end) | (token == newest)) & (token >= oldest)
            score = tl.where(visible[None, :], score, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(score, 1))
            safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
            weight, rescale = tl.exp2(score - safe_max[:, None]), tl.exp2(row_max - safe_max)
            weight_sums = weight_sums * rescale[:, None] + weight
            acc = tl.dot(weight.to(DOT), value.to(DOT), acc * rescale[:, None], input_precision="ieee")
            row_max = new_max
            key, value = next_key, next_value
        row_sum = tl.sum(weight_sums, 1)
        divisor = tl.where(row_sum > 0.0, row_sum, 1.0)  # no visible key: acc is zero
        acc *= (value_scale / divisor)[:, None]
        row_mask = row < GROUP
        out_mask = row_mask[:, None] & (lane < D)[None, :]
        if num_splits == 1:
            tl.store(out + (head * D)[:, None] + lane[None, :], acc.to(out.dtype.element_ty), mask=out_mask)
        else:
            offset = split * H + head
            tl.store(partial_out + (offset * D)[:, None] + lane[None, :], acc, mask=out_mask)
            tl.store(partial_lse + offset, row_max + tl.log2(divisor), mask=row_mask)
            # As in split_k.py: all threads store before one increments the counter, and the last program loads after it.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + kv_head, 1, sem="acq_rel") == num_splits - 1:
                _merge_splits(out, partial_out, partial_lse, kv_head, num_splits, H, D, GROUP, WIDTH, CHUNK)
                tl.store(arrivals + kv_head, 0)


@triton.jit
def _load_blocks(block_table, begin, end, column, P: tl.constexpr):
    """→ the block of each token of a tile: [TILE]. begin: its first token, a multiple of its length."""
    return tl.load(block_table + begin // P + column // P, mask=begin + column < end, other=0, eviction_policy="evict_last")


@triton.jit
def _load_tile(
    keys, block, begin, end, oldest, column, lane, block_stride,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """→ keys and values of tokens begin … begin + TILE - 1, zeros before `oldest` and from `end` on: [TILE, WIDTH]"""
    token = begin + column
    in_range = ((token < end) & (token >= oldest))[:, None] & (lane < D)[None, :]
    slot = (column if TILE >= P else begin + column) % P
    key_ptrs = keys + (block.to(tl.int64) * block_stride + slot * (2 * K * D))[:, None] + lane[None, :]
    key = tl.load(key_ptrs, mask=in_range, other=0.0, eviction_policy="evict_first")
    return key, tl.load(key_ptrs + K * D, mask=in_range, other=0.0, eviction_policy="evict_first")


@triton.jit
def _merge_splits(
    out, partial_out, partial_lse, kv_head, num_splits,
    H: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Merges the splits of all query heads of a KV head by their log-sum-exp, CHUNK splits at a time and in order."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    row, lane = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    head = kv_head * GROUP + row
    max_lse = tl.full([HEADS], float("-inf"), tl.float32)
    weight_sum = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, WIDTH], tl.float32)
    for start in range(0, num_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        split_mask = (split < num_splits)[:, None] & (row < GROUP)[None, :]
        offset = split[:, None] * H + head[None, :]
        lse = tl.load(partial_lse + offset, mask=split_mask, other=float("-inf"), cache_modifier=".cg")
        partial = tl.load(
            partial_out + (offset * D)[:, :, None] + lane[None, None, :],
            mask=split_mask[:, :, None] & (lane < D)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        new_max = tl.maximum(max_lse, tl.max(lse, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weight, rescale = tl.exp2(lse - safe_max[None, :]), tl.exp2(max_lse - safe_max)
        weight_sum = weight_sum * rescale + tl.sum(weight, 0)
        acc = acc * rescale[:, None] + tl.sum(partial * weight[:, :, None], 0)
        max_lse = new_max
    acc = acc / tl.where(weight_sum > 0.0, weight_sum, 1.0)[:, None]
    out_mask = (row < GROUP)[:, None] & (lane < D)[None, :]
    tl.store(out + (head * D)[:, None] + lane[None, :], acc.to(out.dtype.element_ty), mask=out_mask)


def lone_decode(
    qkv: torch.Tensor,
    rotation: Rotation,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    shape: AttentionShape,
    out: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """`rotated_decode` of one request, with its formula, sources and rounding, into out: [1, H, D].

    qkv: [1, H+2K, D]; block_table: [1, M]; context_lens: [1]. Neither the kernel before this one nor any after it in the step
    may write the table, the length, the angles, the slot or the cached tokens: they are read before the wait for that kernel.

    A split has as many tiles as it takes for all splits to fit the card at a time; their number depends only on the request's
    length and the card. Bytes: all visible keys and values once, and 4 · (D + 1) per split and query head, written and read
    again. Operations: 4 · D · H per visible token. What lies outside the window is neither read nor counted; scores, sums and
    outputs are in float32, weights are rounded to the cache's dtype (float16 for an fp8 cache) for the second product.
    """
    kv_bytes, heads = kv_cache.element_size(), shape.num_heads
    splits = max_lone_splits(shape, block_table.shape[1], kv_bytes, qkv.device)
    partials = torch.empty(splits * heads * (shape.head_dim + 1), dtype=torch.float32, device=qkv.device)
    *rotation_tensors, eps, rotary_dim = rotation
    lone_kernel[(splits * shape.num_kv_heads,)](
        qkv, kv_cache, block_table, context_lens, kv_scales, *rotation_tensors, out,
        partials, partials[-splits * heads :], arrival_counters(qkv.device),
        score_factor(shape), kv_cache.stride(0), splits, eps,
        **lone_constants(shape, kv_bytes), ROTARY=rotary_dim, num_warps=lone_warps(shape, kv_bytes), num_stages=1,
        **early_launch(qkv.device, 1),
    )  # fmt: skip


def lone_constants(shape: AttentionShape, kv_bytes: int) -> dict[str, Any]:
    """Constants of `lone_kernel`, except ROTARY."""
    rows = power_of_two(shape.group)
    return {
        **shape_constants(shape),
        "ROWS": max(16, rows),
        "TILE": lone_tile(shape.head_dim, kv_bytes),
        "CHUNK": max(2, MERGE_ELEMENTS // (rows * power_of_two(shape.head_dim))),
    }


def lone_warps(shape: AttentionShape, kv_bytes: int) -> int:
    """Warps of `lone_kernel`: eight where the registers of four do not suffice."""
    return 8 if kv_bytes == 4 or shape.group > 16 else 4


def lone_tile(head_dim: int, kv_bytes: int) -> int:
    """Tokens per tile: for 16-bit heads of 128, 16 KiB of keys and 16 KiB of values, in registers."""
    tile = max(16, min(64, TILE_ELEMENTS // power_of_two(head_dim)))
    return max(16, tile // 2) if kv_bytes == 4 else tile


def max_lone_splits(shape: AttentionShape, max_blocks: int, kv_bytes: int, device: torch.device) -> int:
    """The most splits of a request of up to `max_blocks` blocks: one per tile, as far as they fit the card at a time."""
    tile, num_tokens = lone_tile(shape.head_dim, kv_bytes), max_blocks * shape.block_size
    if shape.sliding_window is not None:
        num_tokens = min(num_tokens, shape.sliding_window + tile)
    programs = multiprocessors(device) * RESIDENT_WARPS // lone_warps(shape, kv_bytes)
    return max(1, min(programs // shape.num_kv_heads, -(-num_tokens // tile)))
