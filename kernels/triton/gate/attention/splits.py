"""Configurations of `kernels.triton.attention.splits` that the compile gate compiles."""

from __future__ import annotations

from itertools import product

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.splits import (
    MERGE_CHUNK,
    MERGE_CONSTANTS,
    MERGE_WARPS,
    SPLIT_QUERIES,
    decode_tiling,
    merge_kernel,
    query_rows,
    split_constants,
)
from kernels.triton.gate.compilation import FP8_CAPABILITIES, Compilation

SPILL_BYTES_MAX = 48
"""For decode kernels, where the assembler trades these few registers for one more program per multiprocessor: 40 bytes over an
fp8 cache with Triton 3.6.0, stored before the loop over tiles and loaded after it, once per split."""


CARDS = ((80,), (89,), (90, 100))
"""Capabilities, grouped by equal tiles."""


def compilations() -> list[Compilation]:
    """The merge, for each head size, and for drafts and the windows of heads of 256. The splits themselves are computed in the
    decode kernel."""
    sizes = [(AttentionShape(16, 32, 8, 64), 2, 1), (AttentionShape(16, 32, 32, 96), 2, 1)]
    numbers = 1, *SPLIT_QUERIES
    sizes += [(AttentionShape(16, 32, 8, 128), kv, queries) for kv in (2, 1) for queries in numbers]
    gemma = [AttentionShape(16, 8, 4, 256, sliding_window=window) for window in (None, 1024)]
    sizes += [(shape, kv, queries) for shape in gemma for kv in (2, 1) for queries in numbers]
    return [
        _compilation(*size, cards)
        for size, cards in product(sizes, CARDS)
        if size[1] > 1 or set(cards) <= set(FP8_CAPABILITIES)
    ]


def _compilation(shape: AttentionShape, kv_bytes: int, queries: int, capabilities: tuple[int, ...]) -> Compilation:
    """kv_bytes: of an element of the cache; capabilities: of cards with the same tiles."""
    tiling = decode_tiling(shape.head_dim, kv_bytes, query_rows(shape, queries), capabilities[-1])
    constants = split_constants(shape, queries, kv_bytes, tiling)
    types: dict[str, str | None] = {"context_lens": "*i32", "query_starts": None if queries == 1 else "*i32", "out": "*bf16"}
    types |= {"partial_out": "*fp32", "partial_lse": "*fp32"}
    types |= {"num_requests": "i32", "max_splits": "i32", "resident_groups": "i32"}
    return Compilation(
        f"merge of splits of {tiling.split}, tiles of {tiling.tile}, head size {shape.head_dim}, "
        f"window {shape.sliding_window}, {queries} tokens",
        merge_kernel,
        types,
        {
            "REQUESTS": 1 if queries == 1 else 256,
            "CHUNK": MERGE_CHUNK,
            **{name: constants[name] for name in MERGE_CONSTANTS},
        },
        num_warps=MERGE_WARPS,
        capabilities=capabilities,
        spill_bytes_max=SPILL_BYTES_MAX,
    )
