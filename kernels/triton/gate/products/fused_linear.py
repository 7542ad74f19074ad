"""Configurations of `kernels.triton.products.fused_linear` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, TYPE_BYTES, Compilation
from kernels.triton.gate.products.epilogue import LLAMA_8B, epilogue_types, squares_block
from kernels.triton.gate.products.tiles import SPILL_BYTES_MAX
from kernels.triton.products.fused_linear import fused_linear_kernel, fused_tiles

QWEN_600M = {"qkv": (4096, 1024), "out": (1024, 2048), "gate_up": (3072, 1024), "down": (1024, 3072)}


def compilations() -> list[Compilation]:
    """Products of a layer of Llama-3.1-8B, also with 8-bit weights, and of Qwen3-0.6B, also with 32-bit rows, on 132
    multiprocessors; fp16 rows for the gated product."""
    kinds = [("llama_8b", LLAMA_8B, "bf16", "bf16", CAPABILITIES), ("qwen_600m", QWEN_600M, "bf16", "bf16", (90,))]
    kinds += [("llama_8b", LLAMA_8B, "bf16", "i8", (80, 90)), ("llama_8b", LLAMA_8B, "bf16", "fp8e4nv", FP8_CAPABILITIES)]
    kinds += [
        ("qwen_600m", QWEN_600M, "fp32", "fp32", (80, 89, 90)),
        ("qwen_600m_rows_of_fp32", {"gate_up": QWEN_600M["gate_up"]}, "fp32", "i8", (90,)),
    ]
    kinds += [
        ("llama_8b_rows_of_fp16", {"gate_up": LLAMA_8B["gate_up"]}, "fp16", weight, (90,))
        for weight in ("fp16", "i8", "fp8e4nv")
    ]
    return [
        _compilation(f"{model}_{name}_{kind}_sm{capability}", name, sizes, rows, kind, capability)
        for model, shapes, rows, kind, cards in kinds
        for capability in cards
        for name, sizes in shapes.items()
    ]


def _compilation(label: str, name: str, sizes: tuple[int, int], rows: str, kind: str, capability: int) -> Compilation:
    """`rows` and `kind` are the types of x and of the weight."""
    outputs, columns = sizes
    type_bytes = {"weight_bytes": TYPE_BYTES[kind], "row_bytes": TYPE_BYTES[rows]}
    tiles = fused_tiles(outputs, columns, capability, 132, gated=name == "gate_up", **type_bytes)
    previous_block_n = fused_tiles(columns, columns, capability, 132, gated=False, **type_bytes).block_n
    epilogue = epilogue_types(fused_linear_kernel, name, f"*{rows}", splits=tiles.splits)
    scales = "*fp32" if TYPE_BYTES[kind] == 1 else None
    numbers = dict.fromkeys(("M", "N", "K", "x_stride", "num_squares", "split_columns"), "i32")
    constants = {
        "GATE": "silu" if name == "gate_up" else None, "EVEN_K": True,
        "SQUARES_BLOCK": squares_block(name, -(-columns // previous_block_n)), "SPLITS": tiles.splits,
        "STAGES": tiles.num_stages, "WARPS": tiles.column_warps,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
    }  # fmt: skip
    return Compilation(
        f"fused_linear_{label}",
        fused_linear_kernel,
        {"x": f"*{rows}", "weight": f"*{kind}", "weight_scales": scales, **epilogue, **numbers, "eps": "fp32", "alpha": "fp32"},
        constants,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        capabilities=(capability,),
        tensor_cores=rows != "fp32",
        small_tile=True,
        spill_bytes_max=SPILL_BYTES_MAX if rows == "fp16" else 0,
        divisible=("N", "K", "x_stride", "split_columns"),
    )
