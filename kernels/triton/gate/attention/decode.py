"""Configurations of `kernels.triton.attention.decode` that the compile gate compiles."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.decode import split_kernel
from kernels.triton.attention.splits import SPLIT_QUERIES, DecodeTiling, decode_tiling, padded_rows, query_rows, split_constants
from kernels.triton.gate.attention.splits import SPILL_BYTES_MAX
from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, TYPE_BYTES, Compilation

SPILL_BYTES_WIDE = 80  # heads of 256 over fp8: loop invariants; with rotation, values between two splits


def compilations() -> list[Compilation]:
    """For every card: Llama-3.1-8B (and Qwen3-8B), Llama-3.2-1B, Qwen3-0.6B, Qwen3-30B-A3B and Gemma 3 in bf16 and with an fp8
    cache, drafts, windows, soft-caps, other head sizes and groups, more requests. `tests/kernels/test_triton_gate_covers.py`
    checks that they cover what models need; the number of heads matters only as far as it determines tiles."""
    llama, small_llama, qwen = (AttentionShape(16, 32, 8, 128), AttentionShape(16, 32, 8, 64), AttentionShape(16, 16, 8, 128))
    gemma, seven = AttentionShape(16, 8, 4, 256, sliding_window=4096, softcap=50.0), AttentionShape(16, 28, 4, 128)
    configurations = []
    for name, shape in {"llama-8b": llama, "llama-1b": small_llama}.items():
        configurations += [_compilation(f"{name} {kv}", shape, "bf16", kv) for kv in ("bf16", "fp8e4nv")]
    configurations += [
        _compilation("llama-8b fp8e4nv, few requests", llama, "bf16", "fp8e4nv", requests=32),
        _compilation("qwen-0.6b fp8e4nv, few requests", qwen, "bf16", "fp8e4nv", requests=32),
        _compilation("7 heads fp8e4nv, few requests", seven, "bf16", "fp8e4nv", requests=32),
        _compilation("16 key heads of 256", AttentionShape(16, 16, 16, 256), "bf16", "bf16", requests=32),
        _compilation("qwen-0.6b fp8e4nv", qwen, "bf16", "fp8e4nv"),
        _compilation("llama-8b bf16, few requests", llama, "bf16", "bf16", requests=32),
        _compilation("llama-8b fp32", llama, "fp32", "fp32"),
        _compilation("verifies 4 tokens fp32", llama, "fp32", "fp32", max_query_len=4),
        _compilation("window and soft-cap fp32", gemma, "fp32", "fp32"),
        _compilation("blocks of 64", replace(llama, block_size=64), "bf16", "bf16"),
        _compilation("head size 96", AttentionShape(16, 32, 32, 96), "bf16", "bf16"),
        _compilation("window and soft-cap", gemma, "bf16", "bf16"),
        _compilation("7 heads", seven, "bf16", "bf16"),
    ]
    verifying = [("llama-8b", llama, kv, queries) for kv in ("bf16", "fp8e4nv") for queries in SPLIT_QUERIES]
    verifying += [("qwen-30b-a3b", AttentionShape(16, 32, 4, 128), "bf16", queries) for queries in SPLIT_QUERIES]
    for name, shape, kv, queries in [*verifying, ("qwen-0.6b", qwen, "bf16", 8)]:
        label = f"{name} {kv} verifies {queries} tokens"
        configurations.append(_compilation(label, shape, "bf16", kv, max_query_len=queries))
    for heads in ((14, 2, 64), (32, 1, 128)):  # many rows over fp8 have shorter tiles
        label = "{}, {} heads of {} fp8e4nv verify 4 tokens".format(*heads)
        configurations.append(_compilation(label, AttentionShape(16, *heads), "bf16", "fp8e4nv", max_query_len=4))
    for requests in (512, 1024):  # beyond 256 seats
        for kv in ("bf16", "fp8e4nv"):
            configurations.append(_compilation(f"llama-8b {kv}, {requests} requests", llama, "bf16", kv, requests=requests))
    label = "llama-8b fp8e4nv verifies 8 tokens, 2048 requests"  # 1024 seats and 64 draft tokens
    configurations.append(_compilation(label, llama, "bf16", "fp8e4nv", max_query_len=8, requests=2048))
    for window in (None, 1024):
        shape = AttentionShape(16, 8, 4, 256, sliding_window=window)
        for (queries, requests), kv in product(((1, 32), (1, 256), (4, 256), (8, 256)), ("bf16", "fp8e4nv")):
            label = f"gemma-3 {kv}, window {window}, {queries} tokens, {requests} requests"
            configurations.append(_compilation(label, shape, "bf16", kv, max_query_len=queries, requests=requests))
    for kv in ("bf16", "fp8e4nv"):
        configurations.append(_compilation(f"llama-8b {kv}", llama, "bf16", kv, rotary=128))
        for name, shape in (("qwen-0.6b", qwen), ("qwen-30b-a3b", AttentionShape(16, 32, 4, 128))):
            configurations.append(_compilation(f"{name} {kv}", shape, "bf16", kv, rotary=128, qk_norm="bf16"))
        for window in (None, 1024):
            shape = AttentionShape(16, 8, 4, 256, sliding_window=window)
            configurations.append(_compilation(f"gemma-3 {kv}, window {window}", shape, "bf16", kv, rotary=256, qk_norm="fp32"))
        configurations.append(_compilation(f"llama-1b {kv}", small_llama, "bf16", kv, rotary=64))
    configurations.append(_compilation("llama-8b fp32", llama, "fp32", "fp32", rotary=128))
    configurations.append(_compilation("7 heads", seven, "bf16", "bf16", rotary=128))
    configurations.append(_compilation("head size 96, 64 turned", AttentionShape(16, 32, 32, 96), "bf16", "bf16", rotary=64))
    return [compilation for several in configurations for compilation in several]


def _compilation(
    name: str,
    shape: AttentionShape,
    dtype: str,
    kv_dtype: str,
    *,
    max_query_len: int = 1,
    requests: int | None = None,
    rotary: int = 0,
    qk_norm: str | None = None,
) -> list[Compilation]:
    """One per tiling, as cards differ in their limits. rotary: the rotated dimensions of `rotated_decode`, which is for few
    requests; 0 is `paged_decode`. qk_norm: dtype of its weights."""
    requests = requests or (32 if rotary else 256)
    signature: dict[str, str | None] = {
        "q": f"*{dtype}", "kv_cache": f"*{kv_dtype}", "block_tables": "*i32", "context_lens": "*i32",
        "query_starts": "*i32" if max_query_len > 1 else None,
        "kv_scales": "*fp32" if "fp8" in kv_dtype else None,
        **dict.fromkeys(("cos", "sin"), f"*{dtype}" if rotary else None),
        **dict.fromkeys(("q_weight", "k_weight"), f"*{qk_norm}" if qk_norm else None),
        "slot_mapping": "*i64" if rotary else None,
        "out": f"*{dtype}", "partial_out": "*fp32", "partial_lse": "*fp32", "num_requests": "i32", "scale": "fp32",
        **dict.fromkeys(("q_stride", "block_stride", "table_stride", "max_splits", "resident_groups"), "i32"),
        "eps": "fp32",
    }  # fmt: skip
    kv_bytes = TYPE_BYTES[kv_dtype]
    tilings: dict[DecodeTiling, list[int]] = {}
    rows = query_rows(shape, max_query_len)
    for number in FP8_CAPABILITIES if "fp8" in kv_dtype else CAPABILITIES:
        tiling = decode_tiling(shape.head_dim, kv_bytes, rows, number, max_query_len)
        tilings.setdefault(tiling.rotated if rotary else tiling, []).append(number)
    return [
        Compilation(
            f"{'rotated' if rotary else 'paged'} decode {name}, tiles of {tiling.tile}, {tiling.programs} at a time",
            split_kernel,
            signature,
            {"ROTARY": rotary, **split_constants(shape, max_query_len, kv_bytes, tiling), "REQUESTS": requests},
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            capabilities=tuple(numbers),
            tensor_cores=kv_bytes < 4,
            small_tile=padded_rows(shape, max_query_len, kv_bytes) < 64,
            spill_bytes_max=SPILL_BYTES_WIDE if rotary or shape.head_dim > 128 else SPILL_BYTES_MAX,
            divisible=("q_stride", "block_stride"),
            registers_max=tiling.registers_max,
            programs=tiling.programs,
        )
        for tiling, numbers in tilings.items()
    ]
