"""The operations between projection and attention: normalise and rotate queries and keys, write keys and values to the
cache."""

from __future__ import annotations

import torch

from kernels.torch.fp8_rows import to_fp8
from kernels.torch.norm import rms_norm


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
    """QK-norm, rotation and cache write.

    qkv: [T, H+2K, D], cos and sin: [T, 1, rotary_dim] as for `_rotate`; in place, and into kv_cache: [N, P, 2, K, D].

    Weights of QK-norm are [D] for each head separately, or [H·D] and [K·D] for all heads of a token together. slot_mapping:
    [T] int64, block · P + offset, below 0 for a token that is not written. kv_scales: [2] float32, of keys and of values: an
    e4m3 cache holds value / scale, None is one. Without a cache nothing is written.
    """
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    if q_weight is not None and k_weight is not None:
        _normalise(qkv[:, :num_heads], q_weight, eps)
        _normalise(qkv[:, num_heads : num_heads + num_kv_heads], k_weight, eps)
    queries_and_keys = qkv[:, : num_heads + num_kv_heads]
    _rotate(queries_and_keys if rotary_dim == qkv.shape[2] else queries_and_keys[:, :, :rotary_dim], cos, sin)
    if kv_cache is not None:
        _write(qkv[:, num_heads:], kv_cache, slot_mapping, kv_scales)


def _normalise(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    """heads: [T, heads, D], in place: each head separately, or all heads of a token together."""
    if weight.shape[0] == heads.shape[2]:
        heads.copy_(rms_norm(heads, weight, eps))
    else:
        heads.copy_(rms_norm(heads.flatten(1), weight, eps).view(heads.shape))


def _rotate(qk: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Rotates pairs (i, i + D/2) in place. qk: [T, heads, D], cos and signed_sin: [T, 1, D]

    The first half of `signed_sin` is negative, so that one roll and one fused multiply-add do the rotation.
    """
    swapped = qk.roll(qk.shape[-1] // 2, -1)
    qk.mul_(cos).addcmul_(swapped, signed_sin)


def _write(kv: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """kv: [T, 2K, D], keys before values"""
    slots = kv_cache.view(kv_cache.shape[0] * kv_cache.shape[1], kv.shape[1], kv.shape[2])
    if kv_cache.dtype is not kv.dtype:
        wide = kv.float().view(kv.shape[0], 2, -1)
        scaled = wide if kv_scales is None else wide / kv_scales[:, None]
        kv, slots = to_fp8(scaled).view(kv.shape).view(torch.uint8), slots.view(torch.uint8)
    try:
        slots.index_copy_(0, slot_mapping, kv)
    except IndexError:  # padding is rare here, and checking for it costs as much as a write
        written = slot_mapping >= 0
        slots.index_copy_(0, slot_mapping[written], kv[written])
