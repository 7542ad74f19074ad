"""The configuration of one tile of `kernels.triton.products.tiles`, whose kernel is launched by three modules."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.products.tiles import GROUP_ROWS, Tiles, linear_kernel

SPILL_BYTES_MAX = 16
"""An assembler that stops at 64 registers spills one or two numbers from before the loop until after it."""


def split_counts(dtype: str) -> tuple[int, ...]:
    """With how many splits tiles of 8-bit weights are compiled: for the types of rows that are served most also without."""
    return (8,) if dtype in ("fp16", "fp32") else (1, 4, 8)


def compilation(
    name: str,
    tiles: Tiles,
    *,
    x: str,
    weight: str,
    out: str = "",
    x_scales: bool = False,
    weight_scales: bool = False,
    capabilities: tuple[int, ...],
) -> Compilation:
    """What `launch` compiles for K divisible by the tile, without bias, with one scale per row."""
    sizes = ("N", "K", "stride_x", "stride_weight", "stride_out", "split_columns")
    signature = {
        "x_ptr": x, "weight_ptr": weight, "out_ptr": out or x, "M": "i32", **dict.fromkeys(sizes, "i32"), "bias_ptr": None,
        "x_scales_ptr": "*fp32" if x_scales else None, "weight_scales_ptr": "*fp32" if weight_scales else None,
        "partials_ptr": "*fp32" if tiles.splits > 1 else None, "counters_ptr": "*i32" if tiles.splits > 1 else None,
    }  # fmt: skip
    constants = {
        "ROW_SCALES": x_scales, "EVEN_K": True,
        "SPLITS": tiles.splits, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
        "GROUP_M": GROUP_ROWS, "STAGES": tiles.num_stages,
    }  # fmt: skip
    return Compilation(
        name, linear_kernel, signature, constants, tiles.num_warps, tiles.num_stages, capabilities,
        tensor_cores=x != "*fp32", small_tile=tiles.block_m < 64, divisible=sizes, spill_bytes_max=SPILL_BYTES_MAX,
    )  # fmt: skip
