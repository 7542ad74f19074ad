"""The operations between projection and attention for a request's newest token, fused into attention kernels: QK-norm and
rotation of its queries and its key, the write of key and value to the paged cache, and the start of the softmax.

As rope_and_cache.py, in registers. The newest token is attended from registers, not from the cache: the softmax
starts with its score, so that no load of a key waits for a store.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.rows.fp8 import clamp_to_e4m3


class Rotation(NamedTuple):
    """Angles, weights of QK-norm and cache slots of the newest tokens, as in `rope_and_cache`."""

    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    rotary_dim: int


NO_ROTATION = (None, None, None, None, None, 0.0, 0)
"""In place of a `Rotation` if queries are already rotated, and keys and values already in the cache."""


@triton.jit
def load_angles(cos, sin, slot_mapping, request, is_valid, is_last, lane, ROTARY: tl.constexpr):
    """→ cosine and sine of the angle, [1, WIDTH] each, the sine negative in its first half, and the slot in the cache, -1
    except for a request's last split. They are written at the start of a step, and every layer reads them."""
    row = request.to(tl.int64)
    lane = lane[None, :]
    is_rotated = lane < ROTARY * is_valid.to(tl.int32)
    cosine = tl.load(cos + row * ROTARY + lane, mask=is_rotated, other=1.0, eviction_policy="evict_last")
    sine = tl.load(sin + row * ROTARY + lane, mask=is_rotated, other=0.0, eviction_policy="evict_last")
    slot = tl.load(slot_mapping + row, mask=is_last, other=-1, eviction_policy="evict_last").to(tl.int64)
    return cosine, sine, slot


@triton.jit
def load_newest(
    qkv, request, is_valid, is_last, heads, is_head, kv_head, lane, qkv_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """→ queries and their rotation partners [ROWS, WIDTH], the key and its partners, and the value, each [1, WIDTH]. Key and
    value are loaded only for a request's last split.

    heads: [ROWS], valid where `is_head`. Element i is rotated with its partner i ± ROTARY / 2.
    """
    HALF: tl.constexpr = ROTARY // 2
    row_ptr = qkv + request.to(tl.int64) * qkv_stride
    lane = lane[None, :]
    partner = tl.where(lane < ROTARY, tl.where(lane < HALF, lane + HALF, lane - HALF), lane)
    valid, last = is_valid.to(tl.int32), is_last.to(tl.int32)
    query_mask = is_head[:, None] & (lane < D * valid)
    query_ptrs = row_ptr + (heads * D)[:, None]
    queries = tl.load(query_ptrs + lane, mask=query_mask, other=0.0)
    query_partners = tl.load(query_ptrs + partner, mask=query_mask, other=0.0)
    key_ptr = row_ptr + (H + kv_head) * D
    key_mask = lane < D * last
    key = tl.load(key_ptr + lane, mask=key_mask, other=0.0)
    key_partners = tl.load(key_ptr + partner, mask=key_mask, other=0.0)
    value = tl.load(key_ptr + K * D + lane, mask=key_mask, other=0.0)
    return queries, query_partners, key, key_partners, value


@triton.jit
def _norm_and_rotate(values, partners, cosine, sine, weight, lane, eps, D: tl.constexpr, ROTARY: tl.constexpr):
    """RMS-norm of each row if there is a `weight`, then rotation: [R, WIDTH] → [R, WIDTH] in the dtype of `values`"""
    HALF: tl.constexpr = ROTARY // 2
    dtype: tl.constexpr = values.dtype
    values, partners = values.to(tl.float32), partners.to(tl.float32)
    if weight is not None:
        partner = tl.where(lane < ROTARY, tl.where(lane < HALF, lane + HALF, lane - HALF), lane)
        inverse_rms = tl.rsqrt(tl.sum(values * values, 1) / D + eps)[:, None]
        values *= inverse_rms * tl.load(weight + lane, mask=lane < D, other=0.0).to(tl.float32)[None, :]
        partners *= inverse_rms * tl.load(weight + partner, mask=lane < D, other=0.0).to(tl.float32)[None, :]
    return (values * cosine.to(tl.float32) + partners * sine.to(tl.float32)).to(dtype)


@triton.jit
def rotate_and_store_newest(
    newest, angles, q_weight, k_weight, kv_cache, kv_scales, kv_head, lane, block_stride, eps,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Stores key and value in the cache if there is a slot. newest: of `load_newest`; angles: of `load_angles` → rotated
    queries [ROWS, WIDTH], key and value [1, WIDTH] in the cache's dtype."""
    queries, query_partners, key, key_partners, value = newest
    cosine, sine, slot = angles
    CACHED: tl.constexpr = kv_cache.dtype.element_ty
    queries = _norm_and_rotate(queries, query_partners, cosine, sine, q_weight, lane, eps, D, ROTARY)
    key = _norm_and_rotate(key, key_partners, cosine, sine, k_weight, lane, eps, D, ROTARY)
    if tl.float8e4nv == CACHED:
        key, value = key.to(tl.float32), value.to(tl.float32)
        if kv_scales is not None:
            key, value = key / tl.load(kv_scales), value / tl.load(kv_scales + 1)
        key, value = clamp_to_e4m3(key).to(CACHED), clamp_to_e4m3(value).to(CACHED)
    cache_ptrs = kv_cache + (slot // P) * block_stride + (slot % P) * (2 * K * D) + kv_head * D + lane[None, :]
    slot_mask = lane[None, :] < D * (slot >= 0).to(tl.int32)
    tl.store(cache_ptrs, key, mask=slot_mask)
    tl.store(cache_ptrs + K * D, value, mask=slot_mask)
    return queries, key, value


@triton.jit
def scaled_score(product, scale, SOFTCAP: tl.constexpr):
    """The base-2 score of a product q · k, after the soft-cap. scale: a `score_factor`."""
    score = product * scale
    if SOFTCAP > 0.0:
        score = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(score) + 1.0)
    return score


@triton.jit
def attend_newest(queries, key, value, is_valid, scale, SOFTCAP: tl.constexpr, TILE: tl.constexpr):
    """→ the initial state of `decode_tiles.attend`, with the newest token already attended if `is_valid`: accumulators of even
    and odd columns, sums of weights and the row maxima. key, value: [1, WIDTH] in the cache's dtype."""
    FP8: tl.constexpr = key.dtype.primitive_bitwidth == 8
    ROWS: tl.constexpr = queries.shape[0]
    WIDTH: tl.constexpr = queries.shape[1]
    DOT: tl.constexpr = tl.float16 if FP8 else key.dtype
    product = tl.sum(queries.to(DOT).to(tl.float32) * key.to(DOT).to(tl.float32), 1)
    row_max = tl.where(is_valid, scaled_score(product, scale, SOFTCAP), float("-inf"))
    weight_sums = tl.where(tl.arange(0, TILE)[None, :] < is_valid.to(tl.int32), 1.0, 0.0) + tl.zeros([ROWS, TILE], tl.float32)
    value = tl.where(is_valid, value.to(tl.float32), 0.0)
    if FP8:
        acc, acc_odd = tl.split(tl.reshape(value, [1, WIDTH // 2, 2]))
    else:
        acc, acc_odd = value, value
    zeros = tl.zeros([ROWS, acc.shape[1]], tl.float32)
    return zeros + acc, zeros + acc_odd, weight_sums, row_max
