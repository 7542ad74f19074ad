"""Configurations of `kernels.triton.sampling.bitmask` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.sampling.bitmask import BLOCK, NUM_WARPS, bitmask_kernel


def compilations() -> list[Compilation]:
    """Logits of 32 and 16 bits; row numbers in the sampler's type."""
    numbers = {"logits_stride": "i32", "masks_stride": "i32", "V": "i32"}
    return [
        Compilation(
            f"apply_bitmask, {dtype}",
            bitmask_kernel,
            {"logits": f"*{dtype}", "masks": "*i32", "rows": "*i64", **numbers},
            {"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
        )
        for dtype in ("fp32", "bf16")
    ]
