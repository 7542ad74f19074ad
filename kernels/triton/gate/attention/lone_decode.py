"""Configurations of `kernels.triton.attention.lone_decode` that the compile gate compiles."""

from __future__ import annotations

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.lone_decode import RESIDENT_WARPS, lone_constants, lone_kernel, lone_warps
from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, TYPE_BYTES, Compilation


def compilations() -> list[Compilation]:
    """Llama-3.1-8B (and Qwen3-8B), Llama-3.2-1B, Qwen3-0.6B, Qwen3-30B-A3B and Gemma 3 in bf16 and with an fp8 cache; a
    soft-cap, other head sizes and groups, float32."""
    llama, qwen = AttentionShape(16, 32, 8, 128), AttentionShape(16, 16, 8, 128)
    configurations = []
    for kv in ("bf16", "fp8e4nv"):
        configurations.append(_compilation("llama-8b", llama, "bf16", kv))
        configurations.append(_compilation("llama-1b", AttentionShape(16, 32, 8, 64), "bf16", kv))
        configurations.append(_compilation("qwen-0.6b", qwen, "bf16", kv, qk_norm="bf16"))
        configurations.append(_compilation("qwen-30b-a3b", AttentionShape(16, 32, 4, 128), "bf16", kv, qk_norm="bf16"))
        for window in (None, 1024):
            shape = AttentionShape(16, 8, 4, 256, sliding_window=window)
            configurations.append(_compilation(f"gemma-3, window {window}", shape, "bf16", kv, qk_norm="fp32"))
    capped = AttentionShape(16, 8, 4, 256, sliding_window=4096, softcap=50.0)
    configurations.append(_compilation("window and soft-cap", capped, "bf16", "bf16"))
    configurations.append(_compilation("llama-8b", llama, "fp32", "fp32"))
    configurations.append(_compilation("7 heads", AttentionShape(16, 28, 4, 128), "bf16", "bf16"))
    configurations.append(_compilation("32 heads of one key head", AttentionShape(16, 32, 1, 128), "bf16", "bf16"))
    configurations.append(_compilation("head size 96, 64 turned", AttentionShape(16, 32, 32, 96), "bf16", "bf16", rotary=64))
    return configurations


def _compilation(
    name: str, shape: AttentionShape, dtype: str, kv_dtype: str, *, rotary: int | None = None, qk_norm: str | None = None
) -> Compilation:
    """qk_norm: dtype of its weights; rotary: None if all dimensions are rotated."""
    signature: dict[str, str | None] = {
        "qkv": f"*{dtype}", "kv_cache": f"*{kv_dtype}", "block_table": "*i32", "context_lens": "*i32",
        "kv_scales": "*fp32" if "fp8" in kv_dtype else None,
        **dict.fromkeys(("q_weight", "k_weight"), f"*{qk_norm}" if qk_norm else None),
        "cos": f"*{dtype}", "sin": f"*{dtype}", "slot_mapping": "*i64", "out": f"*{dtype}",
        "partial_out": "*fp32", "partial_lse": "*fp32", "arrivals": "*i32",
        "scale": "fp32", "block_stride": "i32", "max_splits": "i32", "eps": "fp32",
    }  # fmt: skip
    kv_bytes = TYPE_BYTES[kv_dtype]
    return Compilation(
        f"lone decode {name} {kv_dtype}",
        lone_kernel,
        signature,
        {"ROTARY": rotary or shape.head_dim, **lone_constants(shape, kv_bytes)},
        num_warps=lone_warps(shape, kv_bytes),
        num_stages=1,
        capabilities=FP8_CAPABILITIES if "fp8" in kv_dtype else CAPABILITIES,
        tensor_cores=kv_bytes < 4,
        small_tile=True,
        divisible=("block_stride",),
        programs=RESIDENT_WARPS // lone_warps(shape, kv_bytes),
    )
