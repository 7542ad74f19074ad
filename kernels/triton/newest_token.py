"""The operations between a projection and attention for a request's newest token, inside the kernel that attends it: QK-norm
and rotation of its queries and its key, key and value into the paged cache, and the beginning of the softmax.

As `kernels.triton.rope_and_cache`, in registers. The newest token is attended from registers, not from the cache: the softmax
begins with its score, so that no read of a key waits for a write.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.fp8_rows import clamp_to_e4m3


class Rotation(NamedTuple):
    """Angles, weights of QK-norm and cache slots of newest tokens, as `rope_and_cache` takes them."""

    cos: torch.Tensor
    sin: torch.Tensor
    slot_mapping: torch.Tensor
    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    rotary_dim: int


NO_ROTATION = (None, None, None, None, None, 0.0, 0)
"""Stands for a `Rotation` if queries are rotated already, and keys and values are in the cache."""


@triton.jit
def ask_angles(cos, sin, slot_mapping, request, is_there, is_last, lane, ROTARY: tl.constexpr):
    """→ the angle's cosine and sine, [1, WIDTH] each, negative in the first half, and the place in the cache, which a request's
    last split alone has. They are written when a step begins, and every layer reads them."""
    row = request.to(tl.int64)
    lane = lane[None, :]
    turned = lane < ROTARY * is_there.to(tl.int32)
    cosine = tl.load(cos + row * ROTARY + lane, mask=turned, other=1.0, eviction_policy="evict_last")
    sine = tl.load(sin + row * ROTARY + lane, mask=turned, other=0.0, eviction_policy="evict_last")
    place = tl.load(slot_mapping + row, mask=is_last, other=-1, eviction_policy="evict_last").to(tl.int64)
    return cosine, sine, place


@triton.jit
def ask_newest(
    qkv, request, is_there, is_last, heads, is_head, kv_head, lane, qkv_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """→ queries and their partners in the rotation [ROWS, WIDTH], the key and its partners, and the value, each [1, WIDTH]. Key
    and value only for a request's last split.

    heads: [ROWS], of which `is_head` says which are there. A pair is (i, i + ROTARY / 2).
    """
    HALF: tl.constexpr = ROTARY // 2
    at_row = qkv + request.to(tl.int64) * qkv_stride
    lane = lane[None, :]
    partner = tl.where(lane < ROTARY, tl.where(lane < HALF, lane + HALF, lane - HALF), lane)
    there, last = is_there.to(tl.int32), is_last.to(tl.int32)
    inside = is_head[:, None] & (lane < D * there)
    at_heads = at_row + (heads * D)[:, None]
    queries = tl.load(at_heads + lane, mask=inside, other=0.0)
    query_partners = tl.load(at_heads + partner, mask=inside, other=0.0)
    at_key = at_row + (H + kv_head) * D
    of_key = lane < D * last
    key = tl.load(at_key + lane, mask=of_key, other=0.0)
    key_partners = tl.load(at_key + partner, mask=of_key, other=0.0)
    value = tl.load(at_key + K * D + lane, mask=of_key, other=0.0)
    return queries, query_partners, key, key_partners, value


@triton.jit
def _rotated(values, partners, cosine, sine, weight, lane, eps, D: tl.constexpr, ROTARY: tl.constexpr):
    """RMS-norm of each row by `weight`, where there is one, then the rotation. [R, WIDTH] → [R, WIDTH], in its dtype"""
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
def take_newest(
    asked, angles, q_weight, k_weight, kv_cache, kv_scales, kv_head, lane, block_stride, eps,
    K: tl.constexpr, D: tl.constexpr, P: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Stores key and value in the cache, where there is a place. asked: of `ask_newest`, angles: of `ask_angles` → rotated
    queries [ROWS, WIDTH], key and value [1, WIDTH] as the cache holds them."""
    queries, query_partners, key, key_partners, value = asked
    cosine, sine, place = angles
    CACHED: tl.constexpr = kv_cache.dtype.element_ty
    queries = _rotated(queries, query_partners, cosine, sine, q_weight, lane, eps, D, ROTARY)
    key = _rotated(key, key_partners, cosine, sine, k_weight, lane, eps, D, ROTARY)
    if tl.float8e4nv == CACHED:
        key, value = key.to(tl.float32), value.to(tl.float32)
        if kv_scales is not None:
            key, value = key / tl.load(kv_scales), value / tl.load(kv_scales + 1)
        key, value = clamp_to_e4m3(key).to(CACHED), clamp_to_e4m3(value).to(CACHED)
    at = kv_cache + (place // P) * block_stride + (place % P) * (2 * K * D) + kv_head * D + lane[None, :]
    written = lane[None, :] < D * (place >= 0).to(tl.int32)
    tl.store(at, key, mask=written)
    tl.store(at + K * D, value, mask=written)
    return queries, key, value


@triton.jit
def score_of(product, scale, SOFTCAP: tl.constexpr):
    """In base 2; `scale` is a `score_factor`."""
    score = product * scale
    if SOFTCAP > 0.0:
        score = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(score) + 1.0)
    return score


@triton.jit
def see_newest(queries, key, value, is_there, scale, SOFTCAP: tl.constexpr, TILE: tl.constexpr):
    """What `decode_tiles.attend` begins with, the newest token seen where it is there: sums of values of even and of odd
    columns, weights and the largest score. key, value: [1, WIDTH], as the cache holds them."""
    FP8: tl.constexpr = key.dtype.primitive_bitwidth == 8
    ROWS: tl.constexpr = queries.shape[0]
    WIDTH: tl.constexpr = queries.shape[1]
    DOT: tl.constexpr = tl.float16 if FP8 else key.dtype
    product = tl.sum(queries.to(DOT).to(tl.float32) * key.to(DOT).to(tl.float32), 1)
    largest = tl.where(is_there, score_of(product, scale, SOFTCAP), float("-inf"))
    weights = tl.where(tl.arange(0, TILE)[None, :] < is_there.to(tl.int32), 1.0, 0.0) + tl.zeros([ROWS, TILE], tl.float32)
    value = tl.where(is_there, value.to(tl.float32), 0.0)
    if FP8:
        found, found_odd = tl.split(tl.reshape(value, [1, WIDTH // 2, 2]))
    else:
        found, found_odd = value, value
    empty = tl.zeros([ROWS, found.shape[1]], tl.float32)
    return empty + found, empty + found_odd, weights, largest
