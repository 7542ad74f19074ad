"""Configurations of `kernels.triton.attention_splits` that the compile gate compiles."""

from __future__ import annotations

from kernels.attention_rows import AttentionShape
from kernels.triton.attention_splits import (
    MERGE_CHUNK,
    MERGE_CONSTANTS,
    MERGE_WARPS,
    SPLIT_QUERIES,
    decode_tiling,
    merge_kernel,
    split_constants,
)
from kernels.triton.gate.compilation import Compilation

SPILL_BYTES_MAX = 32
"""The assembler prefers one more program on a multiprocessor to these few registers of the kernels of decodes."""


def compilations() -> list[Compilation]:
    """Of the merge, for each head size, and for guesses and the windows of an fp8 cache; heads of 128 for every card. The
    cutting is part of the kernel of decodes."""
    sizes: list[tuple[tuple[int, int], int | None, int, int, tuple[int, ...]]]
    sizes = [(heads, None, 2, 1, (90, 100)) for heads in ((64, 32), (96, 32), (256, 8))]
    sizes += [((128, 32), None, 2, queries, cards) for queries in (1, *SPLIT_QUERIES) for cards in ((80,), (89,), (90, 100))]
    sizes += [((256, 8), None, 1, 1, (90, 100)), ((256, 8), 1024, 1, 1, (90,))]
    sizes += [((256, 8), window, 1, queries, (90,)) for window in (None, 1024) for queries in SPLIT_QUERIES]
    return [_compilation(*size) for size in sizes]


def _compilation(
    heads: tuple[int, int], window: int | None, kv_bytes: int, queries: int, capabilities: tuple[int, ...]
) -> Compilation:
    """heads: their size, and how many; kv_bytes: of an element of the cache; capabilities: of cards with the same tiles."""
    shape = AttentionShape(16, heads[1], heads[1], heads[0], sliding_window=window)
    constants = split_constants(shape, queries, decode_tiling(heads[0], kv_bytes, 16, capabilities[-1]))
    types = {"context_lens": "*i32", "out": "*bf16", "attended": "*fp32", "log_weights": "*fp32"}
    types |= {"num_requests": "i32", "max_splits": "i32"}
    absent: dict[str, object] = {"query_starts": None} if queries == 1 else {}
    return Compilation(
        f"merge of splits of {constants['SPLIT']}, head size {heads[0]}, window {window}, {queries} tokens",
        merge_kernel,
        types if queries == 1 else types | {"query_starts": "*i32"},
        {
            **absent,
            "REQUESTS": 1 if queries == 1 else 256,
            "CHUNK": MERGE_CHUNK,
            **{name: constants[name] for name in MERGE_CONSTANTS},
        },
        num_warps=MERGE_WARPS,
        capabilities=capabilities,
        spill_bytes_max=SPILL_BYTES_MAX,
    )
