"""Configurations of `kernels.triton.attention.prefill_hopper` that the compile gate compiles."""

from __future__ import annotations

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.chunk_splits import FEW_REQUESTS
from kernels.triton.attention.prefill_hopper import KEYS, NUM_WARPS, ROWS, overlapped_constants, overlapped_kernel
from kernels.triton.gate.compilation import Compilation
from kernels.triton.launching.card_properties import HOPPER


def compilations() -> list[Compilation]:
    """Llama-3.1-8B (and Qwen3-8B), Llama-3.2-1B and Qwen3-0.6B; fp16, larger blocks, a group of heads that does not fill a
    tile; whole tiles, and splits for few requests."""
    llama = AttentionShape(16, 32, 8, 128)
    shapes = {
        "llama-8b bf16": llama,
        "llama-8b fp16": llama,
        "llama-1b bf16": AttentionShape(16, 32, 8, 64),
        "qwen-0.6b bf16": AttentionShape(16, 16, 8, 128),
        "blocks of 64 bf16": AttentionShape(64, 32, 8, 128),
        "7 heads bf16": AttentionShape(16, 28, 4, 128),
    }
    whole = [_compilation(name, shape, is_split=False) for name, shape in shapes.items()]
    whole.append(_compilation("llama-8b bf16", llama, is_split=False, requests=FEW_REQUESTS))
    return whole + [_compilation(name, shape, is_split=True, requests=FEW_REQUESTS) for name, shape in shapes.items()]


def _compilation(name: str, shape: AttentionShape, *, is_split: bool, requests: int = 256) -> Compilation:
    tensors: dict[str, str | None] = dict.fromkeys(("q", "kv_cache", "out"), f"*{name.rpartition(' ')[2]}")
    tensors |= dict.fromkeys(("partial_out", "partial_lse"), "*fp32" if is_split else None)
    tensors |= dict.fromkeys(("block_tables", "query_starts", "context_lens"), "*i32")
    numbers = dict.fromkeys(("num_requests", "num_tiles", "q_stride", "block_stride", "table_stride", "max_splits"), "i32")
    return Compilation(
        f"overlapped prefill{', splits,' if is_split else ', few requests,' if requests == FEW_REQUESTS else ''} {name}",
        overlapped_kernel,
        tensors | numbers | {"scale": "fp32"},
        {**overlapped_constants(shape, is_split=is_split), "REQUESTS": requests},
        num_warps=NUM_WARPS,
        capabilities=(HOPPER,),
        tensor_cores=True,
        exponentials_min=ROWS * KEYS // (32 * NUM_WARPS),
        divisible=("q_stride", "block_stride"),
    )
