"""Configurations of `kernels.triton.products.int8` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import TYPE_BYTES, Compilation
from kernels.triton.gate.products.tiles import compilation, split_counts
from kernels.triton.products.tiles import MEMORY_BOUND_ROWS_MAX, byte_tiles


def compilations() -> list[Compilation]:
    """Every tile that `byte_tiles` may choose, with and without splits."""
    return [
        compilation(
            f"linear_int8_{dtype}_{rows}rows_split{splits}_sm{capability}",
            byte_tiles(rows, (4096, 4096), capability, 132, row_bytes=TYPE_BYTES[dtype]).with_splits(splits),
            x=f"*{dtype}",
            weight="*i8",
            weight_scales=True,
            capabilities=(capability,),
        )
        for dtype, cards in (("bf16", (80, 89, 90, 100)), ("fp16", (90,)), ("fp32", (80, 90, 100)))
        for capability in cards
        for rows in ((16, 32, 64, 128) if dtype != "fp32" else (16, 64, 128))
        for splits in (split_counts(dtype) if rows <= MEMORY_BOUND_ROWS_MAX else (1,))
    ]
