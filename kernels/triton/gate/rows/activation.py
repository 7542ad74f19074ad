"""Configurations of `kernels.triton.rows.activation` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import FP8_CAPABILITIES, Compilation
from kernels.triton.rows.activation import column_tile, gated_fp8_kernel, gated_kernel
from kernels.triton.rows.tiles import row_tile


def compilations() -> list[Compilation]:
    """Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B, few rows and many; Gemma's activation; e4m3 for the widest rows."""
    return [
        *(_plain("bf16", inner, rows) for inner, rows in ((14336, 1), (14336, 4096), (3072, 4096))),
        _plain("fp16", 14336, 1),
        _plain("bf16", 16384, 4096, gelu=True),
        *(_quantised(inner, gelu=False) for inner in (3072, 8192, 14336, 28672)),
        _quantised(14336, gelu=True),
    ]


def _plain(dtype: str, inner: int, rows: int, *, gelu: bool = False) -> Compilation:
    tile = column_tile(rows, inner)
    return Compilation(
        f"{'gelu_tanh' if gelu else 'silu'}_mul_{dtype}_{inner}_{tile.block}",
        gated_kernel,
        {"gate_up": f"*{dtype}", "out": f"*{dtype}", "row_stride": "i32"},
        {"INNER": inner, "BLOCK": tile.block, "GELU": gelu},
        num_warps=tile.num_warps,
        divisible=("row_stride",),
    )


def _quantised(inner: int, *, gelu: bool) -> Compilation:
    tile = row_tile(inner)
    return Compilation(
        f"{'gelu_tanh' if gelu else 'silu'}_mul_fp8_bf16_{inner}",
        gated_fp8_kernel,
        {"gate_up": "*bf16", "quantised": "*fp8e4nv", "scales": "*fp32", "num_rows": "i32", "row_stride": "i32"},
        {"INNER": inner, "BLOCK": tile.block, "ROWS": tile.rows, "GELU": gelu},
        num_warps=tile.num_warps,
        capabilities=FP8_CAPABILITIES,
        divisible=("row_stride",),
    )
