"""Configurations of `kernels.triton.products.fused_int4` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.products.epilogue import LLAMA_8B, epilogue_types, squares_block
from kernels.triton.products.fused_int4 import fused_int4_kernel, fused_int4_tiles
from kernels.triton.products.int4 import OUTPUTS


def compilations() -> list[Compilation]:
    """Products of a layer of Llama-3.1-8B on 132 multiprocessors, groups of 128; smaller groups for the gated product; fp16
    rows, which many 4-bit checkpoints require, for the gated product and one with a residual sum."""
    variants = [(name, "bf16", 128, capability) for capability in (80, 89, 90, 100) for name in LLAMA_8B]
    variants += [("gate_up", "bf16", group, 90) for group in (32, 64)]
    variants += [(name, "fp16", 128, capability) for capability in (80, 90) for name in ("gate_up", "down")]
    return [_compilation(*each) for each in variants]


def _compilation(name: str, dtype: str, group: int, capability: int) -> Compilation:
    outputs, columns = LLAMA_8B[name]
    gated, row_type = name == "gate_up", f"*{dtype}"
    tiles = fused_int4_tiles(outputs, columns, 132, gated=gated)
    epilogue = epilogue_types(fused_int4_kernel, name, row_type, splits=tiles.splits)
    numbers = dict.fromkeys(("M", "N", "K", "x_stride", "num_chunks", "split_chunks", "num_squares"), "i32")
    return Compilation(
        f"fused_int4_llama_8b_{name}_{dtype}_group{group}_sm{capability}",
        fused_int4_kernel,
        {"x": row_type, "words": "*i16", "scales_zeros": "*i32", **epilogue, **numbers, "eps": "fp32", "alpha": "fp32"},
        {
            "GATE": "silu" if gated else None, "GROUP": group, "BFLOAT_SCALES": False, "EVEN_K": True,
            "SQUARES_BLOCK": squares_block(name, 4096 // OUTPUTS), "SPLITS": tiles.splits, "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages,
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        capabilities=(capability,),
        tensor_cores=True,
        small_tile=True,
        divisible=("N", "K", "x_stride"),
    )  # fmt: skip
