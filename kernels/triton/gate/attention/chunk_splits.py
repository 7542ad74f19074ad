"""Configurations of `kernels.triton.attention.chunk_splits` that the compile gate compiles."""

from __future__ import annotations

from itertools import product

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.chunk_splits import FEW_REQUESTS, merge_chunks_kernel, merge_constants
from kernels.triton.attention.splits import MERGE_CHUNK, MERGE_WARPS
from kernels.triton.gate.compilation import Compilation


def compilations() -> list[Compilation]:
    """The merge, for each head size. The splits themselves are computed in the prefill kernels."""
    return [_compilation(*size) for size in product((64, 96, 128, 256), ("bf16", "fp32"))]


def _compilation(head_dim: int, dtype: str) -> Compilation:
    types = {"context_lens": "*i32", "query_starts": "*i32", "out": f"*{dtype}", "partial_out": "*fp32", "partial_lse": "*fp32"}
    numbers = dict.fromkeys(("num_requests", "max_splits", "queries", "window", "keys"), "i32")
    return Compilation(
        f"merge of splits of chunks, head size {head_dim}, {dtype}",
        merge_chunks_kernel,
        types | numbers,
        {**merge_constants(AttentionShape(16, 32, 8, head_dim)), "REQUESTS": FEW_REQUESTS, "CHUNK": MERGE_CHUNK},
        num_warps=MERGE_WARPS,
    )
