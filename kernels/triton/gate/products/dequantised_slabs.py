"""Configurations of `kernels.triton.products.dequantised_slabs` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, Compilation
from kernels.triton.products.dequantised_slabs import BLOCK_K, BLOCK_N, dequantise_bytes_kernel

KINDS = (("i8", "bf16", CAPABILITIES), ("i8", "fp16", (90,)), ("fp8e4nv", "bf16", FP8_CAPABILITIES))
"""Types of values and of slabs, and cards."""


def compilations() -> list[Compilation]:
    """Every type of values and of slabs."""
    sizes = ("num_columns", "stride_values", "stride_out")
    return [
        Compilation(
            f"dequantise_bytes_{values}_{out}",
            dequantise_bytes_kernel,
            {
                "values_ptr": f"*{values}", "scales_ptr": "*fp32", "out_ptr": f"*{out}",
                **dict.fromkeys(("num_rows", *sizes), "i32"),
            },
            {"BLOCK_N": BLOCK_N, "BLOCK_K": BLOCK_K},
            capabilities=cards,
            divisible=sizes,
        )
        for values, out, cards in KINDS
    ]  # fmt: skip
