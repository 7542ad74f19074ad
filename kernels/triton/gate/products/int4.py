"""Configurations of `kernels.triton.products.int4` that the compile gate compiles."""

from __future__ import annotations

from dataclasses import replace

from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.products.tiles import SPILL_BYTES_MAX
from kernels.triton.products.int4 import SPLIT_K_ROWS_MAX, dequantise_int4_kernel, int4_tiles, linear_int4_kernel


def compilations() -> list[Compilation]:
    """Every tile that `int4_tiles` may choose, groups of 128, with splits, for an H200 also without; smaller groups in the
    lowest tile; the unpacking."""
    kinds = [(80, "bf16", 128), (89, "bf16", 128), (90, "bf16", 128), (90, "fp16", 128), (90, "bf16", 32), (100, "bf16", 128)]
    return [
        *(
            _compilation(capability, dtype, group, rows)
            for capability, dtype, group in kinds
            for rows in ((16, 32, 64, 128) if group == 128 else (16,))
        ),
        *(_compilation(90, "bf16", 128, rows, is_split=False) for rows in (16, 32, 64)),
        Compilation(
            "dequantise_int4_bf16",
            dequantise_int4_kernel,
            {
                "words_ptr": "*i16", "scales_zeros_ptr": "*i32", "out_ptr": "*bf16",
                **dict.fromkeys(("N", "first_row", "num_rows", "stride_out"), "i32"),
            },
            {"GROUP": 128, "BFLOAT_SCALES": False, "BLOCK_N": 64},
            divisible=("N", "first_row", "num_rows", "stride_out"),
        ),
    ]  # fmt: skip


def _compilation(capability: int, dtype: str, group: int, rows: int, *, is_split: bool = True) -> Compilation:
    """Is split only where `rows` are few."""
    is_split = is_split and rows <= SPLIT_K_ROWS_MAX
    tiles = replace(int4_tiles(rows, 4096, 4096, capability, 132), splits=8 if is_split else 1)
    sizes = ("N", "K", "stride_x", "stride_out")
    return Compilation(
        f"linear_int4_{dtype}_group{group}_{rows}rows_split{tiles.splits}_sm{capability}",
        linear_int4_kernel,
        {
            "x_ptr": f"*{dtype}", "words_ptr": "*i16", "scales_zeros_ptr": "*i32", "out_ptr": f"*{dtype}",
            "partials_ptr": "*fp32" if is_split else None, "counters_ptr": "*i32" if is_split else None, "bias_ptr": None,
            **dict.fromkeys(("M", *sizes, "num_chunks", "split_chunks"), "i32"),
        },
        {
            "GROUP": group, "BFLOAT_SCALES": False, "EVEN_K": True, "SPLITS": tiles.splits,
            "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages,
        },
        tiles.num_warps, tiles.num_stages, (capability,), tensor_cores=True, small_tile=tiles.block_m < 64, divisible=sizes,
        spill_bytes_max=SPILL_BYTES_MAX,
    )  # fmt: skip
