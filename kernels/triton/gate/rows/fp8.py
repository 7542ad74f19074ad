"""Configurations of `kernels.triton.rows.fp8` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import FP8_CAPABILITIES, Compilation
from kernels.triton.rows.fp8 import quantize_rows_kernel
from kernels.triton.rows.tiles import row_tile


def compilations() -> list[Compilation]:
    """Attention outputs and inputs of e4m3 products: Llama-3.2-1B, Llama-3.1-8B and 70B."""
    return [_compilation(dtype, width) for dtype in ("bf16", "fp16") for width in (2048, 4096, 8192)]


def _compilation(dtype: str, width: int) -> Compilation:
    tile = row_tile(width)
    return Compilation(
        f"quantize_rows_{dtype}_{width}",
        quantize_rows_kernel,
        {"x": f"*{dtype}", "quantised": "*fp8e4nv", "scales": "*fp32", "num_rows": "i32", "x_stride": "i32"},
        {"WIDTH": width, "BLOCK": tile.block, "ROWS": tile.rows},
        num_warps=tile.num_warps,
        capabilities=FP8_CAPABILITIES,
        divisible=("x_stride",),
    )
