"""Configurations of `kernels.triton.products.linear` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import TYPE_BYTES, Compilation
from kernels.triton.gate.products.tiles import compilation
from kernels.triton.products.linear import skinny_candidates


def compilations() -> list[Compilation]:
    """Every candidate, with and without splits, in the types that are served."""
    return [
        compilation(
            f"linear_{dtype}_{tiles.block_n}x{tiles.block_k}_split{splits}_sm{capability}",
            tiles.with_splits(splits),
            x=f"*{dtype}",
            weight=f"*{dtype}",
            capabilities=(capability,),
        )
        for dtype, cards in (("bf16", (80, 89, 90, 100)), ("fp16", (90,)), ("fp32", (89,)))
        for capability in cards
        for tiles in skinny_candidates(capability, TYPE_BYTES[dtype])
        for splits in ((1, 2, 4, 8) if dtype != "fp32" else (8,))
    ]
