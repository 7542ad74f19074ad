"""Normalise and rotate queries and keys, and write keys and values to the cache: token by token, head by head, in float32."""

from __future__ import annotations

import torch

from kernels.reference.fp8_rows import to_fp8
from kernels.reference.norm import rms_norm


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

    qkv: [T, H+2K, D], cos and sin: [T, 1, rotary_dim]; in place, and into kv_cache: [N, P, 2, K, D] at slot_mapping: [T].

    Pairs (i, i + rotary_dim/2) of the first `rotary_dim` dimensions are rotated (arXiv 2104.09864, eq. 34); the sine is
    negative in its first half. Weights of QK-norm (arXiv 2302.05442) are [D] per head, or [H·D] and [K·D] for all heads of a
    token.
    """
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    scales = [1.0, 1.0] if kv_scales is None else kv_scales.tolist()
    for token in range(qkv.shape[0]):
        queries = _rotate(qkv[token, :num_heads], q_weight, eps, cos[token, 0], sin[token, 0], rotary_dim)
        keys = _rotate(
            qkv[token, num_heads : num_heads + num_kv_heads], k_weight, eps, cos[token, 0], sin[token, 0], rotary_dim
        )
        values = qkv[token, num_heads + num_kv_heads :].float()
        qkv[token, :num_heads] = queries.to(qkv.dtype)
        qkv[token, num_heads : num_heads + num_kv_heads] = keys.to(qkv.dtype)
        slot = int(slot_mapping[token])
        if kv_cache is None or slot < 0:
            continue
        block, offset = divmod(slot, kv_cache.shape[1])
        for index, written in enumerate((keys, values)):
            stored = written / scales[index]
            kv_cache[block, offset, index] = (
                to_fp8(stored) if kv_cache.dtype == torch.float8_e4m3fn else written.to(kv_cache.dtype)
            )


def _rotate(
    heads: torch.Tensor, weight: torch.Tensor | None, eps: float, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int
) -> torch.Tensor:
    """heads: [heads, D] of one token, cos and sin: [rotary_dim] → [heads, D] float32"""
    wide = heads.float()
    if weight is not None:
        across_heads = weight.shape[0] != heads.shape[1]
        wide = rms_norm(wide.reshape(-1) if across_heads else wide, weight, eps).reshape(heads.shape)
    half = rotary_dim // 2
    rotated = wide.clone()
    rotated[:, :half] = wide[:, :half] * cos[:half].float() - wide[:, half:rotary_dim] * sin[half:].float()
    rotated[:, half:rotary_dim] = wide[:, half:rotary_dim] * cos[half:].float() + wide[:, :half] * sin[half:].float()
    return rotated
