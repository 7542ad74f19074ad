"""PTX of the kernel that normalises and rotates heads and writes keys and values to the paged cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.reference import rope_and_cache as reference
from kernels.triton.attention import rope_and_cache as kernel
from tests.support.kernel_cases import normal, padded_rows, poisoned
from tests.support.kernel_tolerances import assert_near, assert_same

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 3


@pytest.mark.parametrize(
    ("tokens", "heads", "rotary_dim", "fp8", "normed"),
    [(1, (8, 2, 128), 128, False, False), (5, (4, 2, 64), 64, True, True), (5, (3, 1, 96), 64, False, True)],
)
def test_heads_and_cache_match_the_reference(
    tokens: int, heads: tuple[int, int, int], rotary_dim: int, fp8: bool, normed: bool
) -> None:
    num_heads, kv_heads, size = heads
    wide = (num_heads + 2 * kv_heads) * size
    qkv = padded_rows(normal(tokens, wide, dtype=torch.bfloat16, device=CPU), wide + 16).view(tokens, -1, size)
    angles = normal(tokens, 1, rotary_dim // 2, dtype=torch.float32, device=CPU, seed=1) * 3
    cos = torch.cat((angles.cos(), angles.cos()), -1).bfloat16()
    sin = torch.cat((-angles.sin(), angles.sin()), -1).bfloat16()
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    cache = poisoned(NUM_BLOCKS, BLOCK_SIZE, 2, kv_heads, size, dtype=dtype, device=CPU)
    slots = torch.tensor([40, -1, 3, 15, 16][:tokens])
    options: dict[str, Any] = {"num_kv_heads": kv_heads, "rotary_dim": rotary_dim, "eps": 1e-6}
    if normed:
        weights = normal(2, size, dtype=torch.bfloat16, device=CPU, seed=2)
        options |= {"q_weight": weights[0], "k_weight": weights[1]}
    if fp8:
        options["kv_scales"] = torch.tensor([0.5, 2.0])
    expected, expected_cache = qkv.clone(), cache.clone()
    reference.rope_and_cache(expected, cos, sin, expected_cache, slots, **options)
    kernel.rope_and_cache(qkv, cos, sin, cache, slots, **options)
    assert_near(qkv, expected, "normed", scale=2**6)
    untouched = expected_cache.float().isnan()
    assert_same(untouched, cache.float().isnan())
    assert_near(cache[~untouched], expected_cache[~untouched], "fp8" if fp8 else "normed", scale=2**6)
