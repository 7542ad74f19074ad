"""Configurations of `kernels.triton.fused_int4_row` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.card_properties import HOPPER
from kernels.triton.fused_int4_row import fused_int4_row_kernel
from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.epilogue import LLAMA_8B, epilogue_types, squares_block
from kernels.triton.hopper_gemv import hopper_gemv_tiles


def compilations() -> list[Compilation]:
    """Products of a layer of Llama-3.1-8B, groups of 128; fp16 rows, which many 4-bit checkpoints require, for the gated
    product and one with a residual sum. As in other models: bf16 scales with another gate, a bias (Qwen2), groups of a whole
    row."""
    variants = [(name, "bf16") for name in LLAMA_8B] + [("gate_up", "fp16"), ("down", "fp16")]
    others = [
        _compilation("gate_up", "bf16", gate="gelu_tanh", scales="bf16"),
        _compilation("qkv", "bf16", has_bias=True),
        _compilation("gate_up", "fp16", chunks=32),
        _compilation("down", "fp16", chunks=112),
    ]
    return [_compilation(*each) for each in variants] + others


def _compilation(
    name: str, dtype: str, *, gate: str = "silu", scales: str = "fp16", has_bias: bool = False, chunks: int = 1
) -> Compilation:
    """chunks: per group"""
    gated, row_type = name == "gate_up", f"*{dtype}"
    tiles = hopper_gemv_tiles(gated=gated)
    epilogue = epilogue_types(fused_int4_row_kernel, name, row_type, has_bias=has_bias)
    numbers = dict.fromkeys(("N", "K", "num_chunks", "num_squares"), "i32")
    constants = {
        "GATE": gate if gated else None, "GROUP_CHUNKS": chunks, "BFLOAT_SCALES": scales == "bf16",
        "SQUARES_BLOCK": squares_block(name, 4096 // tiles.block_n), "WARPS": tiles.num_warps,
    }  # fmt: skip
    return Compilation(
        f"fused_int4_row_llama_8b_{name}{'_bias' * has_bias}{f'_{gate}' * gated}_{dtype}_scales_{scales}_group{128 * chunks}",
        fused_int4_row_kernel,
        {"x": row_type, "words": "*i16", "scales_zeros": "*i32", **epilogue, **numbers, "eps": "fp32", "alpha": "fp32"},
        constants,
        num_warps=tiles.num_warps,
        capabilities=(HOPPER,),
        products_behind_load_min=24 if gated else 16,  # those of the second of a turn's two chunks
        tensor_cores=True,
        small_tile=True,
        divisible=("N", "K"),
        registers_max=tiles.registers_max,
        spill_bytes_max=24,  # Triton 3.9.0 with GELU, written before the loop and read after it
        programs=16 // tiles.num_warps,
    )
