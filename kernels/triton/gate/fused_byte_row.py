"""Configurations of `kernels.triton.fused_byte_row` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.card_properties import HOPPER
from kernels.triton.fused_byte_row import fused_byte_row_kernel
from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.epilogue import LLAMA_8B, epilogue_types, squares_block
from kernels.triton.hopper_gemv import hopper_gemv_tiles


def compilations() -> list[Compilation]:
    """Products of a layer of Llama-3.1-8B in int8 and e4m3; fp16 rows for the gated product and one with a residual sum; one
    scale for a whole matrix (checkpoints); another gate and a bias, as in other models."""
    variants = [(name, kind) for kind in ("i8", "fp8e4nv") for name in LLAMA_8B]
    others = [_compilation(name, kind, row="fp16") for kind in ("i8", "fp8e4nv") for name in ("gate_up", "down")]
    others += [_compilation(name, "fp8e4nv", column_scales=False) for name in LLAMA_8B]
    others += [_compilation("gate_up", "i8", gate="gelu_tanh"), _compilation("qkv", "i8", has_bias=True)]
    return [_compilation(*each) for each in variants] + others


def _compilation(
    name: str, kind: str, *, row: str = "bf16", gate: str = "silu", column_scales: bool = True, has_bias: bool = False
) -> Compilation:
    """`row` and `kind` are the types of x and of the weight."""
    gated, row_type = name == "gate_up", f"*{row}"
    tiles = hopper_gemv_tiles(gated=gated)
    epilogue = epilogue_types(fused_byte_row_kernel, name, row_type, has_bias=has_bias)
    constants = {
        "GATE": gate if gated else None, "COLUMN_SCALES": column_scales,
        "SQUARES_BLOCK": squares_block(name, 4096 // tiles.block_n), "WARPS": tiles.num_warps,
    }  # fmt: skip
    label = f"{name}{'_bias' * has_bias}{f'_{gate}' * gated}_{row}_{kind}{'' if column_scales else '_one_scale'}"
    return Compilation(
        f"fused_byte_row_llama_8b_{label}",
        fused_byte_row_kernel,
        {"x": row_type, "weight": f"*{kind}", "weight_scales": "*fp32", **epilogue,
         **dict.fromkeys(("N", "K", "num_squares"), "i32"), "eps": "fp32", "alpha": "fp32"},
        constants,
        num_warps=tiles.num_warps,
        capabilities=(HOPPER,),
        tensor_cores=True,
        small_tile=True,
        divisible=("N", "K"),
        registers_max=tiles.registers_max,
        spill_bytes_max=24,  # when gated: written before the loop and read after it
        programs=16 // tiles.num_warps,
        products_behind_load_min=16 if gated else 8,  # those of the second of a turn's two chunks
    )  # fmt: skip
