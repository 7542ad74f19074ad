"""The operations between projection and attention, in one pass over each token: queries and keys are normalised (QK-norm,
arXiv 2302.05442) and rotated (arXiv 2104.09864, eq. 34), keys and values are written to the cache.

Reads a token's row and writes its queries and keys in place, and 2 · K · D elements of the cache.
"""

from __future__ import annotations

import torch

from kernels.simd.compiling import entry, subroutine, task
from kernels.simd.launching import Launch
from kernels.simd.norm import inverse_rms, scale_row, sum_of_squares
from kernels.simd.threads import argument, float_argument, run, thread_range
from kernels.simd.vectors import BYTES, LANES, fma, load_int64, masked_load, masked_store


@subroutine
def _normalise(heads, count, head_dim, weight, across_heads, eps):
    """Normalise each head separately, or all heads of a token together if the weight is that wide."""
    if across_heads:
        head_dim, count = head_dim * count, 1
    for head in range(count):
        values = heads + head * head_dim * BYTES
        scale_row(values, weight, values, head_dim, inverse_rms(sum_of_squares(values, head_dim), head_dim, eps))


@subroutine
def _rotate(head, cos, sin, rotary_dim):
    """Rotate pairs (i, i + rotary_dim / 2); the first half of the sines is negative."""
    half = rotary_dim // 2
    upper = head + half * BYTES
    for i in range(0, half, LANES):
        low, high = masked_load(head, i, half), masked_load(upper, i, half)
        rotated_low = fma(high, masked_load(sin, i, half), low * masked_load(cos, i, half))
        rotated_high = fma(low, masked_load(sin + half * BYTES, i, half), high * masked_load(cos + half * BYTES, i, half))
        masked_store(head, i, half, rotated_low)
        masked_store(upper, i, half, rotated_high)


@subroutine
def _copy(source, target, count):
    for i in range(0, count, LANES):
        masked_store(target, i, count, masked_load(source, i, count))


@task
def _process_tokens(a):
    qkv, cos, sin, cache, slots = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4)
    num_heads, num_kv_heads, head_dim, rotary_dim = argument(a, 6), argument(a, 7), argument(a, 8), argument(a, 9)
    q_weight, k_weight, across_heads, eps = argument(a, 10), argument(a, 11), argument(a, 12), float_argument(a, 13)
    first, end = thread_range(a, argument(a, 5))
    for token in range(first, end):
        queries = qkv + token * (num_heads + 2 * num_kv_heads) * head_dim * BYTES
        keys = queries + num_heads * head_dim * BYTES
        if q_weight:
            _normalise(queries, num_heads, head_dim, q_weight, across_heads, eps)
            _normalise(keys, num_kv_heads, head_dim, k_weight, across_heads, eps)
        angle_offset = token * rotary_dim * BYTES
        for head in range(num_heads + num_kv_heads):
            _rotate(queries + head * head_dim * BYTES, cos + angle_offset, sin + angle_offset, rotary_dim)
        slot = load_int64(slots, token) if cache else -1
        if slot >= 0:
            width = 2 * num_kv_heads * head_dim
            _copy(keys, cache + slot * width * BYTES, width)


@entry(16, 1)
def _run(
    pool, threads, task, qkv, cos, sin, cache, slots, num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim,
    q_weight, k_weight, across_heads, eps,
):  # fmt: skip
    run(
        pool, threads, task,
        (qkv, cos, sin, cache, slots, num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim,
         q_weight, k_weight, across_heads, eps),
    )  # fmt: skip


_process = Launch(_run, _process_tokens, num_rows_at=5, num_floats=1)


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
) -> None:
    """QK-norm, rotation and cache write.

    qkv: [T, H+2K, D] float32, in place, and into kv_cache: [N, P, 2, K, D] float32 or None at slot_mapping: [T] int64, below
    0 for a token that is not written. cos and sin: [T, 1, rotary_dim], the sine negative in its first half. Weights of QK-norm
    are [D] for each head separately, or [H·D] and [K·D] for all heads of a token together.
    """
    assert qkv.is_contiguous(), "rows are changed in place"
    num_tokens, width, head_dim = qkv.shape
    _process(
        qkv.numel(),
        qkv.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        0 if kv_cache is None else kv_cache.data_ptr(),
        slot_mapping.data_ptr(),
        num_tokens,
        width - 2 * num_kv_heads,
        num_kv_heads,
        head_dim,
        rotary_dim,
        0 if q_weight is None else q_weight.data_ptr(),
        0 if k_weight is None else k_weight.data_ptr(),
        int(q_weight is not None and q_weight.shape[0] != head_dim),
        eps,
    )
