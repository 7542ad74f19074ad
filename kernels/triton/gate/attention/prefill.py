"""Configurations of `kernels.triton.attention.prefill` that the compile gate compiles."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.chunk_splits import FEW_REQUESTS
from kernels.triton.attention.prefill import PrefillTiling, prefill_constants, prefill_kernel, prefill_tiling
from kernels.triton.attention.prefill_hopper import is_overlapped
from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, TYPE_BYTES, Compilation

SPILL_BYTES_MAX = 80
"""For loop invariants, where the tile fills all registers: 100 with an fp8 cache."""
SPLITS_SPILL_BYTES_MAX = 120
"""The same for splits, which have more loop invariants: where their results are written."""


def compilations() -> list[Compilation]:
    """For every card: Llama-3.1-8B (and Qwen3-8B), Llama-3.2-1B, Qwen3-0.6B and Gemma 3, in bf16 and with an fp8 cache; short
    chunks, windows, soft-caps, other head sizes, float32. Those of `prefill_hopper` are in its own file."""
    llama, small_llama, qwen = (AttentionShape(16, 32, 8, 128), AttentionShape(16, 32, 8, 64), AttentionShape(16, 16, 8, 128))
    gemma = AttentionShape(16, 8, 4, 256, sliding_window=4096, softcap=50.0)
    configurations = []
    for name, shape in {"llama-8b": llama, "llama-1b": small_llama, "qwen-0.6b": qwen}.items():
        configurations += [_compilation(f"{name} {kv}", shape, "bf16", kv) for kv in ("bf16", "fp8e4nv")]
    configurations += [
        _compilation("llama-8b bf16, few requests", llama, "bf16", "bf16", requests=32),
        _compilation("llama-8b fp8e4nv, few requests", llama, "bf16", "fp8e4nv", requests=32),
        _compilation("window", replace(llama, sliding_window=4096), "bf16", "bf16"),
        _compilation("head size 96", AttentionShape(16, 32, 32, 96), "bf16", "bf16"),
        _compilation("window and soft-cap", gemma, "bf16", "bf16"),
        _compilation("float32", llama, "fp32", "fp32"),
        _compilation("float32, window and soft-cap", gemma, "fp32", "fp32"),
        _compilation("short chunks", llama, "bf16", "bf16", max_query_len=16),
        _compilation("short chunks, few requests", llama, "bf16", "bf16", max_query_len=16, requests=32),
        _compilation("short chunks fp8e4nv", llama, "bf16", "fp8e4nv", max_query_len=16),
        _compilation("short chunks fp8e4nv, few requests", llama, "bf16", "fp8e4nv", max_query_len=16, requests=32),
        _compilation("short chunks of one head", AttentionShape(16, 32, 32, 128), "bf16", "bf16", max_query_len=16),
    ]
    configurations += _split_forms(llama, small_llama, gemma)
    for window in (None, 1024):
        shape = AttentionShape(16, 8, 4, 256, sliding_window=window)
        for requests, kv in product((32, 256), ("bf16", "fp8e4nv")):
            label = f"gemma-3 {kv}, window {window}, {requests} requests"
            configurations.append(_compilation(label, shape, "bf16", kv, requests=requests))
    return [compilation for several in configurations for compilation in several]


def _split_forms(llama: AttentionShape, small_llama: AttentionShape, gemma: AttentionShape) -> list[list[Compilation]]:
    """Steps with few tiles, whose keys are split: tiles of 128 and of fewer rows, as above."""
    wide, split = AttentionShape(16, 8, 4, 256), partial(_compilation, requests=FEW_REQUESTS, is_split=True)
    configurations = [
        split("splits, float32", llama, "fp32", "fp32"),
        split("splits, head size 96", AttentionShape(16, 32, 32, 96), "bf16", "bf16"),
    ]
    for kv in ("bf16", "fp8e4nv"):
        configurations += [
            split(f"splits, llama-8b {kv}", llama, "bf16", kv),
            split(f"splits, llama-1b {kv}", small_llama, "bf16", kv),
            split(f"splits, short chunks {kv}", llama, "bf16", kv, max_query_len=16),
            split(f"splits, gemma-3 {kv}", wide, "bf16", kv),
        ]
    return [
        *configurations,
        split("splits, window", replace(llama, sliding_window=4096), "bf16", "bf16"),
        split("splits, window and soft-cap", gemma, "bf16", "bf16"),
        split("splits, short chunks of one head", AttentionShape(16, 32, 32, 128), "bf16", "bf16", max_query_len=16),
    ]


def _compilation(
    name: str,
    shape: AttentionShape,
    dtype: str,
    kv_dtype: str,
    *,
    max_query_len: int = 2048,
    requests: int = 256,
    is_split: bool = False,
) -> list[Compilation]:
    """One per tiling, as cards differ in their limits, without those that another kernel serves on Hopper."""
    tensors: dict[str, str | None] = {"q": f"*{dtype}", "kv_cache": f"*{kv_dtype}", "out": f"*{dtype}"}
    tensors |= dict.fromkeys(("block_tables", "query_starts", "context_lens"), "*i32")
    tensors |= dict.fromkeys(("partial_out", "partial_lse"), "*fp32" if is_split else None)
    tensors["kv_scales"] = "*fp32" if "fp8" in kv_dtype else None
    numbers = dict.fromkeys(("num_requests", "num_tiles", "q_stride", "block_stride", "table_stride", "max_splits"), "i32")
    rows = max_query_len * shape.group
    kv_bytes = TYPE_BYTES[kv_dtype]
    tilings: dict[PrefillTiling, list[int]] = {}
    for number in FP8_CAPABILITIES if "fp8" in kv_dtype else CAPABILITIES:
        tiling = prefill_tiling(shape.head_dim, kv_bytes, rows, shape.sliding_window is not None, number)
        if not is_overlapped(shape, kv_bytes, tiling.rows, number):
            tilings.setdefault(tiling, []).append(number)
    return [
        Compilation(
            f"paged prefill {name}, tiles of {tiling.rows} by {tiling.keys}",
            prefill_kernel,
            {**tensors, **numbers, "scale": "fp32"},
            {**prefill_constants(shape, tiling, is_split=is_split), "REQUESTS": requests},
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            capabilities=tuple(numbers_of),
            tensor_cores=kv_bytes < 4,
            small_tile=tiling.rows < 64,
            spill_bytes_max=SPLITS_SPILL_BYTES_MAX if is_split else SPILL_BYTES_MAX,
            divisible=("q_stride", "block_stride"),
            programs=tiling.programs,
        )
        for tiling, numbers_of in tilings.items()
    ]
