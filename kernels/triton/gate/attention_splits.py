"""Configurations of `kernels.triton.attention_splits` that the compile gate compiles."""

from __future__ import annotations

from itertools import product

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
from kernels.triton.gate.compilation import FP8_CAPABILITIES, Compilation

SPILL_BYTES_MAX = 48
"""The assembler prefers one more program on a multiprocessor to these few registers of the kernels of decodes: 40 bytes over an
fp8 cache with Triton 3.6.0, written before the loop over tiles and read behind it, once for each split."""


CARDS = ((80,), (89,), (90, 100))
"""Each with the same tiles."""


def compilations() -> list[Compilation]:
    """Of the merge, for each head size, and for guesses and the windows of heads of 256. The cutting is part of the kernel of
    decodes."""
    sizes: list[tuple[tuple[int, int], int | None, int, int]]
    sizes = [((64, 32), None, 2, 1), ((96, 32), None, 2, 1)]
    sizes += [((128, 32), None, 2, queries) for queries in (1, *SPLIT_QUERIES)]
    sizes += [((256, 8), window, kv, queries) for window in (None, 1024) for kv in (2, 1) for queries in (1, *SPLIT_QUERIES)]
    return [
        _compilation(*size, cards)
        for size, cards in product(sizes, CARDS)
        if size[2] > 1 or set(cards) <= set(FP8_CAPABILITIES)
    ]


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
