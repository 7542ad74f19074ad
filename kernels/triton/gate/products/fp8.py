"""Configurations of `kernels.triton.products.fp8` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import TYPE_BYTES, Compilation
from kernels.triton.gate.products.tiles import compilation, split_counts
from kernels.triton.products.tiles import MEMORY_BOUND_ROWS_MAX, byte_tiles

KINDS = (
    ("fp8e4nv", "bf16", (89, 90, 100)), ("bf16", "bf16", (89, 90, 100)), ("fp16", "fp16", (90,)), ("fp32", "fp32", (90,)),
)  # fmt: skip
"""Types of rows and of results, and cards."""


def compilations() -> list[Compilation]:
    """e4m3 and float rows, every tile that `byte_tiles` may choose, with and without splits."""
    return [
        compilation(
            f"linear_fp8_{x}_{rows}rows_split{splits}_sm{capability}",
            byte_tiles(rows, (4096, 4096), capability, 132, row_bytes=TYPE_BYTES[x]).with_splits(splits),
            x=f"*{x}",
            weight="*fp8e4nv",
            out=f"*{out}",
            x_scales=x == "fp8e4nv",
            weight_scales=True,
            capabilities=(capability,),
        )
        for x, out, cards in KINDS
        for capability in cards
        for rows in ((16, 32, 64, 128) if x != "fp32" else (16, 64, 128))
        for splits in (split_counts(x) if rows <= MEMORY_BOUND_ROWS_MAX else (1,))
    ]
