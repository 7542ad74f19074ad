"""Configurations of `kernels.triton.attention.rope_and_cache` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.attention.rope_and_cache import head_tile, kernel_sizes, rope_and_cache_kernel
from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, Compilation


def compilations() -> list[Compilation]:
    """Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B in a decode step and in a prefill; fp16; e4m3; only some dimensions rotated;
    without a cache, as steps are timed and texts are embedded."""
    return [
        *(_compilation("bf16", shape, tokens) for shape in ((32, 8, 128, 128), (32, 8, 64, 64)) for tokens in (1, 4096)),
        *(_compilation("bf16", (16, 8, 128, 128), tokens, norm=True) for tokens in (1, 4096)),
        _compilation("fp16", (32, 8, 128, 128), 1),
        _compilation("bf16", (32, 8, 128, 96), 4096),
        _compilation("bf16", (24, 8, 96, 96), 1),
        *(_compilation("bf16", (32, 8, 128, 128), tokens, cache="fp8e4nv") for tokens in (1, 4096)),
        _compilation("bf16", (16, 8, 128, 128), 1, norm=True, cache="fp8e4nv"),
        *(
            _compilation("bf16", (heads, 8, 128, 128), tokens, norm=norm, cache=cache, is_cached=False)
            for heads, norm, cache in ((32, False, None), (32, False, "fp8e4nv"), (16, True, None))
            for tokens in (1, 4096)
        ),
    ]


def _compilation(
    dtype: str,
    shape: tuple[int, int, int, int],
    num_tokens: int,
    *,
    norm: bool = False,
    cache: str | None = None,
    is_cached: bool = True,
) -> Compilation:
    heads, kv_heads, head_dim, rotary_dim = shape
    tile = head_tile(num_tokens, heads, kv_heads, rotary_dim)
    tensors: dict[str, str | None] = {
        "qkv": f"*{dtype}",
        "cos": f"*{dtype}",
        "sin": f"*{dtype}",
        "kv_cache": f"*{cache or dtype}" if is_cached else None,
        "slot_mapping": "*i64",
        "q_weight": f"*{dtype}" if norm else None,
        "k_weight": f"*{dtype}" if norm else None,
        "kv_scales": "*fp32" if cache else None,
    }
    numbers = {"num_tokens": "i32", "qkv_stride": "i32", "block_stride": "i32", "slot_stride": "i32", "eps": "fp32"}
    words = "_".join(
        str(part)
        for part in (dtype, *shape, num_tokens, "norm" if norm else "", cache or "", "" if is_cached else "no_cache")
        if part != ""
    )
    return Compilation(
        f"rope_and_cache_{words}",
        rope_and_cache_kernel,
        {**tensors, **numbers},
        kernel_sizes(heads, kv_heads, head_dim, rotary_dim, 16 if is_cached else 1, tile),
        num_warps=tile.num_warps,
        capabilities=FP8_CAPABILITIES if cache else CAPABILITIES,
        divisible=("qkv_stride", "block_stride", "slot_stride"),
    )
