"""The decode of a single request: rotation, cache write, attention and the merge of its splits in one launch.

With a single request nothing hides a wait: a layer of Llama-3.1-8B attends 4 MB, a microsecond of an H200's memory, and took 13
µs in two launches (docs/log/gpu-kernels.md), most of it in loads that wait for one another. Here every tile of keys has its own
program as long as the card has room; lengths, blocks and the first tile are loaded before the wait for the projection, and the
last program to finish merges the splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention_rows import AttentionShape
from kernels.triton.attention_decode import score_factor
from kernels.triton.attention_splits import shape_constants
from kernels.triton.early_launch import early_launch, wait_for_previous
from kernels.triton.newest_token import Rotation, ask_angles, ask_newest, score_of, take_newest
from kernels.triton.split_k import arrival_counters
from kernels.triton.tuning import multiprocessors, power_of_two

TILE_NUMBERS, MERGED_NUMBERS = 8192, 8192
"""Numbers in a tile of keys, and numbers of splits' results that are added up at a time: 64 per thread."""
WARPS = 8
"""Per multiprocessor, as two programs of four: while one computes, 32 KiB of the other's keys and values are being loaded."""


@triton.jit(do_not_specialize=["max_splits"])
def lone_kernel(
    qkv, kv_cache, block_table, context_lens, kv_scales, cos, sin, slot_mapping, q_weight, k_weight, out, attended, log_weights,
    arrivals, scale, block_stride, max_splits, eps,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROTARY: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program i: key head i % K, split i // K where there are so many. The last split sees the newest token and stores it."""
    kv_head, split = tl.program_id(0) % K, tl.program_id(0) // K
    GROUP: tl.constexpr = H // K
    DOT: tl.constexpr = tl.float16 if kv_cache.dtype.element_ty.primitive_bitwidth == 8 else kv_cache.dtype.element_ty
    row, lane, column = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, TILE)
    head = kv_head * GROUP + row % GROUP
    # Nothing that is asked for before the wait is written by the kernel in front.
    context_len = tl.load(context_lens, eviction_policy="evict_last")
    first = context_len * 0
    if WINDOW > 0:
        first = tl.maximum(context_len - WINDOW, 0) // TILE * TILE
    num_tiles = tl.cdiv(context_len - first, TILE)
    tiles = tl.cdiv(num_tiles, max_splits)
    num_splits = tl.maximum(tl.cdiv(num_tiles, tl.maximum(tiles, 1)), 1)
    begin = first + split * tiles * TILE
    newest, oldest = context_len - 1, context_len - (WINDOW if WINDOW > 0 else context_len)
    end = tl.minimum(begin + tiles * TILE, newest)  # of what is in the cache
    is_last = split + 1 == num_splits
    keys = kv_cache + kv_head * D
    block = _blocks(block_table, begin, end, column, P)
    key, value = _tile(keys, block, begin, end, oldest, column, lane, block_stride, K, D, P, TILE)
    block = _blocks(block_table, begin + TILE, end, column, P)
    value_scale = 1.0
    if kv_scales is not None:
        scale *= tl.load(kv_scales, eviction_policy="evict_last")
        value_scale = tl.load(kv_scales + 1, eviction_policy="evict_last")
    request, is_there = split * 0, split < num_splits
    angles = ask_angles(cos, sin, slot_mapping, request, is_there, is_last, lane, ROTARY)
    wait_for_previous(EARLY)
    if is_there:
        asked = ask_newest(qkv, request, is_there, is_last, head, row < GROUP, kv_head, lane, 0, H, K, D, ROTARY)
        queries, newest_key, newest_value = take_newest(
            asked, angles, q_weight, k_weight, kv_cache, kv_scales, kv_head, lane, block_stride, eps, K, D, P, ROTARY
        )
        queries = queries.to(DOT)
        found = tl.zeros([ROWS, WIDTH], tl.float32)
        weights = tl.zeros([ROWS, TILE], tl.float32)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        for start in range(begin, end + is_last.to(tl.int32), TILE):
            token = start + column
            if start + TILE > newest:
                is_newest = (token == newest)[:, None]
                key, value = tl.where(is_newest, newest_key, key), tl.where(is_newest, newest_value, value)
            score = score_of(tl.dot(queries, tl.trans(key.to(DOT)), input_precision="ieee"), scale, SOFTCAP)
            # A thread has registers for three tiles, not for four.
            next_key, next_value = _tile(keys, block, start + TILE, end, oldest, column, lane, block_stride, K, D, P, TILE)
            block = _blocks(block_table, start + 2 * TILE, end, column, P)
            seen = ((token < end) | (token == newest)) & (token >= oldest)
            score = tl.where(seen[None, :], score, float("-inf"))
            larger = tl.maximum(largest, tl.max(score, 1))
            base = tl.where(larger == float("-inf"), 0.0, larger)
            weight, faded = tl.exp2(score - base[:, None]), tl.exp2(largest - base)
            weights = weights * faded[:, None] + weight
            found = tl.dot(weight.to(DOT), value.to(DOT), found * faded[:, None], input_precision="ieee")
            largest = larger
            key, value = next_key, next_value
        weight = tl.sum(weights, 1)
        positive = tl.where(weight > 0.0, weight, 1.0)  # nothing was seen: zeros, whatever they are divided by
        found *= (value_scale / positive)[:, None]
        live = row < GROUP
        inside = live[:, None] & (lane < D)[None, :]
        if num_splits == 1:
            tl.store(out + (head * D)[:, None] + lane[None, :], found.to(out.dtype.element_ty), mask=inside)
        else:
            place = split * H + head
            tl.store(attended + (place * D)[:, None] + lane[None, :], found, mask=inside)
            tl.store(log_weights + place, largest + tl.log2(positive), mask=live)
            # As in split_k.py: all have stored before one of them says so, and read after they know.
            tl.debug_barrier()
            if tl.atomic_add(arrivals + kv_head, 1, sem="acq_rel") == num_splits - 1:
                _merge(out, attended, log_weights, kv_head, num_splits, H, D, GROUP, WIDTH, CHUNK)
                tl.store(arrivals + kv_head, 0)


@triton.jit
def _blocks(block_table, begin, end, column, P: tl.constexpr):
    """→ the block of each token of the tile that begins at `begin`, which is a multiple of its length: [TILE]"""
    return tl.load(block_table + begin // P + column // P, mask=begin + column < end, other=0, eviction_policy="evict_last")


@triton.jit
def _tile(
    keys, block, begin, end, oldest, column, lane, block_stride,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """→ keys and values of tokens begin … begin + TILE - 1, zeros for those before `oldest` and from `end` on: [TILE, WIDTH]"""
    token = begin + column
    inside = ((token < end) & (token >= oldest))[:, None] & (lane < D)[None, :]
    at = (column if TILE >= P else begin + column) % P
    place = keys + (block.to(tl.int64) * block_stride + at * (2 * K * D))[:, None] + lane[None, :]
    key = tl.load(place, mask=inside, other=0.0, eviction_policy="evict_first")
    return key, tl.load(place + K * D, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def _merge(
    out, attended, log_weights, kv_head, num_splits,
    H: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The average of the splits by weight, of all query heads of a key head, CHUNK splits at a time and in their order."""
    HEADS: tl.constexpr = triton.next_power_of_2(GROUP)
    row, lane = tl.arange(0, HEADS), tl.arange(0, WIDTH)
    head = kv_head * GROUP + row
    largest = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    found = tl.zeros([HEADS, WIDTH], tl.float32)
    for start in range(0, num_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        there = (split < num_splits)[:, None] & (row < GROUP)[None, :]
        place = split[:, None] * H + head[None, :]
        log_weight = tl.load(log_weights + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        part = tl.load(
            attended + (place * D)[:, :, None] + lane[None, None, :],
            mask=there[:, :, None] & (lane < D)[None, None, :], other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        larger = tl.maximum(largest, tl.max(log_weight, 0))
        base = tl.where(larger == float("-inf"), 0.0, larger)
        weight, faded = tl.exp2(log_weight - base[None, :]), tl.exp2(largest - base)
        total = total * faded + tl.sum(weight, 0)
        found = found * faded[:, None] + tl.sum(part * weight[:, :, None], 0)
        largest = larger
    found = found / tl.where(total > 0.0, total, 1.0)[:, None]
    inside = (row < GROUP)[:, None] & (lane < D)[None, :]
    tl.store(out + (head * D)[:, None] + lane[None, :], found.to(out.dtype.element_ty), mask=inside)


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
    writes the table, the length, the angles, the place or the cache's content: they are read before the wait for that kernel.

    A split has so many tiles that all splits fit the card at a time; this depends only on the request's length and the card.
    """
    kv_bytes, heads = kv_cache.element_size(), shape.num_heads
    splits = most_splits(shape, block_table.shape[1], kv_bytes, qkv.device)
    parts = torch.empty(splits * heads * (shape.head_dim + 1), dtype=torch.float32, device=qkv.device)
    *given, eps, rotary_dim = rotation
    lone_kernel[(splits * shape.num_kv_heads,)](
        qkv, kv_cache, block_table, context_lens, kv_scales, *given, out,
        parts, parts[-splits * heads :], arrival_counters(qkv.device), score_factor(shape), kv_cache.stride(0), splits, eps,
        **lone_constants(shape, kv_bytes), ROTARY=rotary_dim, num_warps=warps_of(shape, kv_bytes), num_stages=1,
        **early_launch(qkv.device, 1),
    )  # fmt: skip


def lone_constants(shape: AttentionShape, kv_bytes: int) -> dict[str, Any]:
    """Constants of `lone_kernel`, except ROTARY."""
    rows = power_of_two(shape.group)
    return {
        **shape_constants(shape),
        "ROWS": max(16, rows),
        "TILE": lone_tile(shape.head_dim, kv_bytes),
        "CHUNK": max(2, MERGED_NUMBERS // (rows * power_of_two(shape.head_dim))),
    }


def warps_of(shape: AttentionShape, kv_bytes: int) -> int:
    """More than four if a thread would lack registers."""
    return 8 if kv_bytes == 4 or shape.group > 16 else 4


def lone_tile(head_dim: int, kv_bytes: int) -> int:
    """Tokens per tile: 16 KiB of 16-bit keys and as much of values for heads of 128, in registers."""
    tile = max(16, min(64, TILE_NUMBERS // power_of_two(head_dim)))
    return max(16, tile // 2) if kv_bytes == 4 else tile


def most_splits(shape: AttentionShape, max_blocks: int, kv_bytes: int, device: torch.device) -> int:
    """The most splits of a request of at most `max_blocks` blocks: one tile each, up to the programs that the card holds."""
    tile, num_tokens = lone_tile(shape.head_dim, kv_bytes), max_blocks * shape.block_size
    if shape.sliding_window is not None:
        num_tokens = min(num_tokens, shape.sliding_window + tile)
    programs = multiprocessors(device) * WARPS // warps_of(shape, kv_bytes)
    return max(1, min(programs // shape.num_kv_heads, -(-num_tokens // tile)))
