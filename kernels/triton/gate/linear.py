"""Configurations of `kernels.triton.linear` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import TYPE_BYTES, Compilation
from kernels.triton.gate.linear_tiles import compilation
from kernels.triton.linear import candidates, stages_on, tiles_of


def compilations() -> list[Compilation]:
    """Every candidate, whole and divided, in the types that are served."""
    return [
        compilation(
            f"linear_{dtype}_{block_n}x{block_k}_split{splits}_sm{card}",
            tiles_of(block_n, block_k, stages_on(stages, card, TYPE_BYTES[dtype]), splits),
            x=f"*{dtype}",
            weight=f"*{dtype}",
            capabilities=(card,),
        )
        for dtype, cards in (("bf16", (80, 89, 90, 100)), ("fp16", (90,)), ("fp32", (89,)))
        for card in cards
        for block_n, block_k, stages in candidates(TYPE_BYTES[dtype])
        for splits in ((1, 2, 4, 8) if dtype != "fp32" else (8,))
    ]
