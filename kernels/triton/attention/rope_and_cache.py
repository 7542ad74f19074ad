"""The operations between projection and attention, in one launch: QK-norm, rotation in place, keys and values into the cache.

A row is one head of one token; a program processes several rows. All loads of a row are issued before any store, so a decode
step pays the memory latency once. Rows are distributed over threads in the same way for any number of rows: eight elements, 16
bytes, per thread. So the sums of QK-norm are the same in every batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.launching.card_properties import power_of_two
from kernels.triton.launching.early_launch import early_launch, wait_for_previous
from kernels.triton.rows.fp8 import clamp_to_e4m3
from kernels.triton.rows.norm import rms_norm

TOKENS_MANY = 512
"""From this many tokens on there are more rows than threads on the card, and a program processes several rows per thread."""
ELEMENTS_WARP = 32 * 8


class HeadTile(NamedTuple):
    """`heads` heads of each of `tokens` tokens, computed by `num_warps` warps."""

    tokens: int
    heads: int
    num_warps: int


def head_tile(num_tokens: int, num_heads: int, num_kv_heads: int, rotary_dim: int) -> HeadTile:
    """One warp with one load per thread for each half of its rows, or four warps with two."""
    rows_warp = max(1, ELEMENTS_WARP // power_of_two(rotary_dim // 2))
    common = math.gcd(num_heads, num_kv_heads)
    heads = min(rows_warp, common & -common)
    num_warps = 1 if num_tokens < TOKENS_MANY else 4
    rows = rows_warp if num_tokens < TOKENS_MANY else rows_warp * 2 * num_warps
    return HeadTile(rows // heads, heads, num_warps)


@triton.jit
def _store_to_cache(value, pointers, scale, mask):
    """Stores value (float32), divided by the scale if there is one, in the cache's dtype."""
    if scale is not None:
        value = value / tl.load(scale)
    if pointers.dtype.element_ty == tl.float8e4nv:
        value = clamp_to_e4m3(value)
    tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def rope_and_cache_kernel(
    qkv, cos, sin, kv_cache, slot_mapping, q_weight, k_weight, kv_scales,
    num_tokens, qkv_stride, block_stride, slot_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
    TILE_TOKENS: tl.constexpr, TILE_HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    HALF: tl.constexpr = ROTARY // 2
    row = tl.arange(0, TILE_TOKENS * TILE_HEADS)
    token = (tl.program_id(0) * TILE_TOKENS + row // TILE_HEADS).to(tl.int64)
    first_head = tl.program_id(1) * TILE_HEADS
    head = first_head + row % TILE_HEADS
    row_mask = token < num_tokens
    head_ptrs = qkv + token * qkv_stride + head * HEAD_DIM
    k_scale, v_scale = None, None
    if kv_scales is not None:
        k_scale, v_scale = kv_scales, kv_scales + 1
    if kv_cache is not None:
        slot = tl.load(slot_mapping + token, mask=row_mask, other=-1).to(tl.int64)
        slot_mask = (slot >= 0)[:, None]
        # Values follow keys in the cache as in the projection: one head index serves both.
        slot_ptrs = (
            kv_cache + (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * slot_stride + (head - HEADS) * HEAD_DIM
        )
    if first_head < HEADS + KV_HEADS:
        pair = tl.arange(0, HALF_BLOCK)[None, :]
        pair_mask = row_mask[:, None] & (pair < HALF)
        first = tl.load(head_ptrs[:, None] + pair, mask=pair_mask, other=0.0).to(tl.float32)
        second = tl.load(head_ptrs[:, None] + HALF + pair, mask=pair_mask, other=0.0).to(tl.float32)
        # Both halves of a cosine are the same, and the second half of the sine has no sign.
        cosine = tl.load(cos + token[:, None] * ROTARY + pair, mask=pair_mask, other=0.0).to(tl.float32)
        sine = tl.load(sin + token[:, None] * ROTARY + HALF + pair, mask=pair_mask, other=0.0).to(tl.float32)
        if REST_BLOCK > 0:
            rest_lane = tl.arange(0, REST_BLOCK)[None, :]
            rest_mask = row_mask[:, None] & (rest_lane < HEAD_DIM - ROTARY)
            rest = tl.load(head_ptrs[:, None] + ROTARY + rest_lane, mask=rest_mask, other=0.0).to(tl.float32)
        if q_weight is not None:
            weight = q_weight
            if first_head >= HEADS:
                weight = k_weight
            # One address per element: each thread loads the weights it needs, without an exchange between threads.
            weight_ptrs = tl.broadcast_to(weight + pair, [TILE_TOKENS * TILE_HEADS, HALF_BLOCK])
            first_weight = tl.load(weight_ptrs, mask=pair_mask, other=0.0).to(tl.float32)
            second_weight = tl.load(weight_ptrs + HALF, mask=pair_mask, other=0.0).to(tl.float32)
            squares = tl.sum(first * first + second * second, axis=1)
            if REST_BLOCK > 0:
                squares += tl.sum(rest * rest, axis=1)
            inverse_rms = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
            first *= inverse_rms * first_weight
            second *= inverse_rms * second_weight
            if REST_BLOCK > 0:
                rest *= inverse_rms * tl.load(weight + ROTARY + rest_lane, mask=rest_lane < HEAD_DIM - ROTARY, other=0.0).to(
                    tl.float32
                )
        rotated_first = first * cosine - second * sine
        rotated_second = second * cosine + first * sine
        tl.store(head_ptrs[:, None] + pair, rotated_first.to(qkv.dtype.element_ty), mask=pair_mask)
        tl.store(head_ptrs[:, None] + HALF + pair, rotated_second.to(qkv.dtype.element_ty), mask=pair_mask)
        if REST_BLOCK > 0 and q_weight is not None:
            tl.store(head_ptrs[:, None] + ROTARY + rest_lane, rest.to(qkv.dtype.element_ty), mask=rest_mask)
        if kv_cache is not None and first_head >= HEADS:
            _store_to_cache(rotated_first, slot_ptrs[:, None] + pair, k_scale, pair_mask & slot_mask)
            _store_to_cache(rotated_second, slot_ptrs[:, None] + HALF + pair, k_scale, pair_mask & slot_mask)
            if REST_BLOCK > 0:
                _store_to_cache(rest, slot_ptrs[:, None] + ROTARY + rest_lane, k_scale, rest_mask & slot_mask)
    elif kv_cache is not None:
        column = tl.arange(0, HEAD_BLOCK)[None, :]
        column_mask = row_mask[:, None] & (column < HEAD_DIM)
        value = tl.load(head_ptrs[:, None] + column, mask=column_mask, other=0.0).to(tl.float32)
        _store_to_cache(value, slot_ptrs[:, None] + column, v_scale, column_mask & slot_mask)


def rope_and_cache(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    *,
    num_kv_heads: int,
    rotary_dim: int,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """q, k = rotate(norm(q), norm(k)) in place; k / k_scale and v / v_scale to the cache at each token's slot

    rotate: (x_i, x_{i+r/2}) → (x_i cos - x_{i+r/2} sin, x_{i+r/2} cos + x_i sin) for i below r/2, r = rotary_dim. Sources:
    arXiv 2104.09864, eq. 34; QK-norm arXiv 2302.05442; the cache arXiv 2309.06180, section 4.

    qkv: [T, H+2K, D] fp32, fp16 or bf16, tokens need not be contiguous. cos, sin: [T, 1, r] in qkv's dtype, the sine negative
    in its first half. kv_cache: [N, P, 2, K, D] in qkv's dtype or e4m3, any strides of blocks and slots, or None: nothing is
    written. slot_mapping: [T] int64 or int32, block · P + offset, below 0 for a token that is not written. Weights: [D] for
    each head separately; or [H·D] and [K·D], which costs two more launches. kv_scales: [2] float32, None is one.

    Reads T·(H+2K)·D elements and T·r of cos and sin, writes T·(H+K)·D in place and T·2K·D to the cache; 6 operations per
    element and 4 more for the norm, in float32; rounded once. Tokens beyond T and padding of D and r to powers of two are
    masked. e4m3 needs capability 89.
    """
    num_tokens, total_heads, head_dim = qkv.shape
    num_heads = total_heads - 2 * num_kv_heads
    if num_tokens == 0:
        return
    if q_weight is not None and k_weight is not None and q_weight.shape[0] != head_dim:
        _norm_all_heads(qkv[:, :num_heads], q_weight, eps)
        _norm_all_heads(qkv[:, num_heads : num_heads + num_kv_heads], k_weight, eps)
        q_weight, k_weight = None, None
    tile = head_tile(num_tokens, num_heads, num_kv_heads, rotary_dim)
    groups = (total_heads if kv_cache is not None else num_heads + num_kv_heads) // tile.heads
    block_size, strides = (1, (0, 0)) if kv_cache is None else (kv_cache.shape[1], kv_cache.stride()[:2])
    rope_and_cache_kernel[(triton.cdiv(num_tokens, tile.tokens), groups)](
        qkv, cos, sin, kv_cache, slot_mapping, q_weight, k_weight, kv_scales,
        num_tokens, qkv.stride(0), strides[0], strides[1], eps,
        **kernel_sizes(num_heads, num_kv_heads, head_dim, rotary_dim, block_size, tile),
        num_warps=tile.num_warps, **early_launch(qkv.device, num_tokens),
    )  # fmt: skip


def _norm_all_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """RMS-norm of all heads of a token as one row, in place. heads: [T, heads, D]"""
    rows = heads.flatten(1)
    rms_norm(rows, weight, eps, out=rows)


def kernel_sizes(
    num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, block_size: int, tile: HeadTile
) -> dict[str, object]:
    """Constants of `rope_and_cache_kernel`."""
    rest = head_dim - rotary_dim
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "ROTARY": rotary_dim,
        "BLOCK_SIZE": block_size,
        "HALF_BLOCK": power_of_two(rotary_dim // 2),
        "REST_BLOCK": power_of_two(rest) if rest else 0,
        "HEAD_BLOCK": power_of_two(head_dim),
        "TILE_TOKENS": tile.tokens,
        "TILE_HEADS": tile.heads,
    }
