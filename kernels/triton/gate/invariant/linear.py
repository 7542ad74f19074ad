"""Configurations of `kernels.triton.invariant.linear` that the compile gate compiles."""

from __future__ import annotations

import torch

from kernels.quantised_weights import FP8
from kernels.triton.gate.compilation import Compilation
from kernels.triton.invariant.linear import GROUP_ROWS, invariant_kernel, invariant_tiles
from kernels.triton.products.tiles import Tiles

SPILL_BYTES_MAX = 64


def compilations() -> list[Compilation]:
    """Every tile that `invariant_tiles` may choose, with and without splits, in the types that are served."""
    bf16, all_cards = torch.bfloat16, (80, 89, 90, 100)
    kinds = [("bf16", "bf16", "bf16", bf16, all_cards), ("fp16", "fp16", "fp16", torch.float16, (90,))]
    kinds += [("bf16", "i8", "bf16", bf16, (80, 90, 100)), ("bf16", "fp8e4nv", "bf16", bf16, (89, 90))]
    kinds += [("fp8e4nv", "fp8e4nv", "bf16", FP8, (89, 90, 100)), ("fp32", "fp32", "fp32", torch.float32, (80, 90))]
    return [
        _compilation(x, weight, out, invariant_tiles((4096, 4096), dtype, 1, capability, 132), capability, splits)
        for x, weight, out, dtype, cards in kinds
        for capability in cards
        for splits in ((1, 4, 8) if capability == 90 else (4,))
    ]


def _compilation(x: str, weight: str, out: str, tiles: Tiles, capability: int, splits: int) -> Compilation:
    scales = {"x_scales_ptr": "*fp32" if x == "fp8e4nv" else None, "weight_scales_ptr": "*fp32" if "8" in weight else None}
    sizes = ("N", "K", "stride_x", "stride_weight", "stride_out", "split_columns")
    return Compilation(
        f"invariant_linear_{x}_{weight}_split{splits}_sm{capability}",
        invariant_kernel,
        {
            "x_ptr": f"*{x}", "weight_ptr": f"*{weight}", **scales, "bias_ptr": None, "out_ptr": f"*{out}",
            "partials_ptr": "*fp32", "counters_ptr": "*i32", **dict.fromkeys(("M", *sizes), "i32"),
        },
        {
            "ROW_SCALES": x == "fp8e4nv", "EVEN_K": True, "SPLITS": splits,
            "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "GROUP_M": GROUP_ROWS,
            "STAGES": tiles.num_stages,
        },
        tiles.num_warps, tiles.num_stages, (capability,), tensor_cores=x != "fp32", divisible=sizes,
        spill_bytes_max=SPILL_BYTES_MAX, fp_fusion=False,
    )  # fmt: skip
