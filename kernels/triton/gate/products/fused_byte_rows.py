"""Configurations of `kernels.triton.products.fused_byte_rows` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.products.epilogue import LLAMA_8B, PLAIN, epilogue_types, squares_block
from kernels.triton.launching.card_properties import HOPPER
from kernels.triton.products.fused_byte_rows import fused_byte_rows_kernel
from kernels.triton.products.hopper_tiles import OPERAND_ROWS, tile_sizes

SIZES = LLAMA_8B | {PLAIN: (28672, 4096)}
KINDS = ("i8", "fp8e4nv")
SPILL_BYTES_MAX = 64
"""With 16 rows: what the epilogue reads, and addresses."""
NARROW = 2304
"""So few outputs that programs have 16 of them for any number of rows."""


def compilations() -> list[Compilation]:
    """Products of a layer of Llama-3.1-8B in int8 and e4m3, for 1, 8 and 16 rows, and a plain one; fp16 rows for the gated
    product and one with a residual sum; matrices of few outputs; another gate and a bias, as in other models."""
    found = [_compilation(name, kind, rows) for rows in (1, 8, 16) for kind in KINDS for name in SIZES]
    found += [_compilation(name, kind, 1, row="fp16") for kind in KINDS for name in ("gate_up", "down")]
    found += [
        _compilation(PLAIN, kind, 16, outputs=4096) for kind in KINDS
    ]  # a program for each multiprocessor: more registers
    found += [_compilation(name, "i8", rows, outputs=NARROW) for name, rows in (("down", 8), ("qkv", 16))]
    return [
        *found,
        _compilation("qkv", "i8", 1, has_bias=True),
        _compilation("gate_up", "i8", 1, gate="gelu_tanh"),
        _compilation("gate_up", "i8", 16, row="fp16"),
    ]


def _compilation(
    name: str,
    kind: str,
    rows: int,
    *,
    row: str = "bf16",
    gate: str = "silu",
    has_bias: bool = False,
    outputs: int = 0,
) -> Compilation:
    """`row` and `kind` are the types of x and of the weight; `outputs`: instead of those of Llama-8B's product."""
    gated, row_type = name == "gate_up", f"*{row}"
    tiles = tile_sizes(rows, outputs or SIZES[name][0], 132, gated=gated, bits=8)
    previous = tile_sizes(rows, outputs or 4096, 132, gated=False, bits=8)
    constants = {
        "GATE": gate if gated else None,
        "SQUARES_BLOCK": squares_block(name, (outputs or 4096) // previous.block_n), "NUM_ROWS": tiles.num_rows,
        "OUTPUTS": tiles.block_n, "WARPS": tiles.num_warps,
    }  # fmt: skip
    label = f"{name}{'_bias' * has_bias}{f'_{gate}' * gated}_{row}_{kind}"
    return Compilation(
        f"fused_byte_rows_llama_8b_{label}{f'_{outputs}_outputs' if outputs else ''}_{rows}rows",
        fused_byte_rows_kernel,
        {"x": row_type, "weight": f"*{kind}", "weight_scales": "*fp32",
         **epilogue_types(fused_byte_rows_kernel, name, row_type, has_bias=has_bias),
         **dict.fromkeys(("M", "N", "K", "x_stride", "num_squares"), "i32"), "eps": "fp32", "alpha": "fp32"},
        constants,
        num_warps=tiles.num_warps,
        capabilities=(HOPPER,),
        tensor_cores=True,
        small_tile=True,
        divisible=("N", "K", "x_stride"),
        registers_max=tiles.registers_max,
        spill_bytes_max=SPILL_BYTES_MAX if tiles.num_rows > OPERAND_ROWS else 16,
        programs=65536 // (32 * tiles.num_warps * tiles.registers_max),
        products_behind_load_min=8 * (tiles.block_n // 16) * (2 if gated else 1) * max(1, tiles.num_rows // OPERAND_ROWS),
    )  # fmt: skip
