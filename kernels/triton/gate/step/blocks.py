"""Configurations of `kernels.triton.step.blocks` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.step.blocks import BLOCK, NUM_WARPS, copy_blocks_kernel, stage_blocks_kernel


def compilations() -> list[Compilation]:
    """One configuration per kernel: dtypes and shapes of a cache make no difference."""
    sizes = {"block_words": "i32", "block_stride": "i32"}
    ids = {"addresses": "*i64", "sources": "*i64", "targets": "*i64"}
    staged = {"addresses": "*i64", "blocks": "*i64", "staging": "*i64", "rows": "*i64", **sizes, "num_layers": "i32"}
    divisible = ("block_words", "block_stride")
    copy = Compilation(
        "copy_blocks", copy_blocks_kernel, ids | sizes, {"BLOCK": BLOCK}, num_warps=NUM_WARPS, divisible=divisible
    )
    return [
        copy,
        *(
            Compilation(
                name,
                stage_blocks_kernel,
                staged,
                {"BLOCK": BLOCK, "TO_STAGING": to_staging},
                num_warps=NUM_WARPS,
                divisible=divisible,
            )
            for name, to_staging in (("gather_blocks", True), ("scatter_blocks", False))
        ),
    ]
