"""Configurations of `kernels.triton.products.fused_int4_rows` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.products.epilogue import LLAMA_8B, PLAIN, epilogue_types, squares_block
from kernels.triton.launching.card_properties import HOPPER
from kernels.triton.products.fused_int4_rows import fused_int4_rows_kernel
from kernels.triton.products.hopper_tiles import OPERAND_ROWS, tile_sizes

SIZES = LLAMA_8B | {PLAIN: (28672, 4096)}
SPILL_BYTES_MAX = 112
"""With 16 rows: what the epilogue reads, and addresses."""
NARROW = 2304
"""So few outputs that programs have 16 of them for any number of rows."""


def compilations() -> list[Compilation]:
    """Products of a layer of Llama-3.1-8B, groups of 128, for 1, 8 and 16 rows, and a plain one; fp16 rows, which many 4-bit
    checkpoints require, for the gated product and one with a residual sum; matrices of few outputs. As in other models: bf16
    scales with another gate, a bias (Qwen2), groups of a whole row."""
    found = [_compilation(name, "bf16", rows) for rows in (1, 8, 16) for name in SIZES]
    found += [_compilation(name, "fp16", rows) for name, rows in (("gate_up", 1), ("down", 1), ("gate_up", 16))]
    found += [_compilation(PLAIN, "bf16", 16, outputs=4096)]  # a program for each multiprocessor: more registers
    found += [_compilation(name, "bf16", rows, outputs=NARROW) for name, rows in (("down", 8), ("qkv", 16))]
    return [
        *found,
        _compilation("qkv", "bf16", 1, has_bias=True),
        _compilation("gate_up", "bf16", 1, gate="gelu_tanh", scales="bf16"),
        _compilation("gate_up", "fp16", 1, chunks=32),
        _compilation("down", "fp16", 1, chunks=112),
    ]


def _compilation(
    name: str,
    dtype: str,
    rows: int,
    *,
    gate: str = "silu",
    scales: str = "fp16",
    has_bias: bool = False,
    chunks: int = 1,
    outputs: int = 0,
) -> Compilation:
    """chunks: per group; `outputs`: instead of those of Llama-8B's product"""
    gated, row_type = name == "gate_up", f"*{dtype}"
    tiles = tile_sizes(rows, outputs or SIZES[name][0], 132, gated=gated, bits=4)
    previous = tile_sizes(rows, outputs or 4096, 132, gated=False, bits=4)
    constants = {
        "GATE": gate if gated else None, "GROUP_CHUNKS": chunks, "BFLOAT_SCALES": scales == "bf16",
        "SQUARES_BLOCK": squares_block(name, (outputs or 4096) // previous.block_n), "NUM_ROWS": tiles.num_rows,
        "OUTPUTS": tiles.block_n, "WARPS": tiles.num_warps,
    }  # fmt: skip
    label = f"{name}{'_bias' * has_bias}{f'_{gate}' * gated}_{dtype}_scales_{scales}_group{128 * chunks}"
    return Compilation(
        f"fused_int4_rows_llama_8b_{label}{f'_{outputs}_outputs' if outputs else ''}_{rows}rows",
        fused_int4_rows_kernel,
        {"x": row_type, "words": "*i16", "scales_zeros": "*i32",
         **epilogue_types(fused_int4_rows_kernel, name, row_type, has_bias=has_bias),
         **dict.fromkeys(("M", "N", "K", "x_stride", "num_chunks", "num_squares"), "i32"), "eps": "fp32", "alpha": "fp32"},
        constants,
        num_warps=tiles.num_warps,
        capabilities=(HOPPER,),
        products_behind_load_min=(8 + 8 * (tiles.block_n // 16) * (2 if gated else 1)) * max(1, tiles.num_rows // OPERAND_ROWS),
        tensor_cores=True,
        small_tile=True,
        divisible=("N", "K", "x_stride"),
        registers_max=tiles.registers_max,
        spill_bytes_max=SPILL_BYTES_MAX if tiles.num_rows > OPERAND_ROWS else 16,
        programs=65536 // (32 * tiles.num_warps * tiles.registers_max),
    )  # fmt: skip
