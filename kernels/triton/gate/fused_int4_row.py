"""Configurations of `kernels.triton.fused_int4_row` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.fused_int4 import HOPPER, int4_row_tiles
from kernels.triton.fused_int4_row import fused_int4_row_kernel
from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.fused_sums import LLAMA_8B, around_types
from kernels.triton.tuning import power_of_two


def compilations() -> list[Compilation]:
    """Products of a layer of Llama-3.1-8B, groups of 128; rows of fp16, which many checkpoints of 4 bits ask for, where it is
    gated and where it is added."""
    asked = [(name, "bf16") for name in LLAMA_8B] + [("gate_up", "fp16"), ("down", "fp16")]
    return [_compilation(*each) for each in asked]


def _compilation(name: str, dtype: str) -> Compilation:
    gated, own = name == "gate_up", f"*{dtype}"
    tiles = int4_row_tiles(gated=gated)
    around, absent = around_types(name, own, 1)
    arguments = set(fused_int4_row_kernel.arg_names)
    numbers = dict.fromkeys(("N", "K", "num_chunks", "num_squares"), "i32")
    constants = {
        "GATE": "silu" if gated else None, "CHUNKS": 1, "BFLOAT_SCALES": False,
        "SQUARES_BLOCK": power_of_two(4096 // tiles.block_n), "WARPS": tiles.num_warps,
    }  # fmt: skip
    return Compilation(
        f"fused_int4_row_llama_8b_{name}_{dtype}",
        fused_int4_row_kernel,
        {"x": own, "words": "*i16", "scales_zeros": "*i32", **around, **numbers, "eps": "fp32", "alpha": "fp32"},
        {**{key: value for key, value in absent.items() if key in arguments}, **constants},
        num_warps=tiles.num_warps,
        capabilities=(HOPPER,),
        tensor_cores=True,
        small_tile=True,
        divisible=("N", "K"),
        registers_max=tiles.registers_max,
        spill_bytes_max=32,  # written before the loop and read behind it
        programs=16 // tiles.num_warps,
    )
