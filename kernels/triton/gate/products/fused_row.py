"""Configurations of `kernels.triton.products.fused_row` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, TYPE_BYTES, Compilation
from kernels.triton.gate.products.epilogue import LLAMA_8B, RESIDUAL_SUMS, epilogue_types, squares_block
from kernels.triton.gate.products.fused_linear import QWEN_600M
from kernels.triton.products.fused_row import fused_row_kernel, gemv_tiles


def compilations() -> list[Compilation]:
    """One row through a layer of Llama-3.1-8B, also with 8-bit weights, and of Qwen3-0.6B; in fp16 for the gated product."""
    kinds = [("llama_8b", LLAMA_8B, "bf16", "bf16", CAPABILITIES), ("qwen_600m", QWEN_600M, "bf16", "bf16", (89, 90))]
    kinds += [("llama_8b", LLAMA_8B, "bf16", "i8", (80, 90)), ("llama_8b", LLAMA_8B, "bf16", "fp8e4nv", FP8_CAPABILITIES)]
    kinds += [
        ("llama_8b_row_of_fp16", {"gate_up": LLAMA_8B["gate_up"]}, "fp16", weight, (90,))
        for weight in ("fp16", "i8", "fp8e4nv")
    ]
    return [
        _compilation(f"{model}_{name}_{kind}_sm{capability}", name, sizes, row, kind, capability)
        for model, shapes, row, kind, cards in kinds
        for capability in cards
        for name, sizes in shapes.items()
    ]


def _compilation(label: str, name: str, sizes: tuple[int, int], row: str, kind: str, capability: int) -> Compilation:
    """`row` and `kind` are the types of x and of the weight."""
    columns, has_squares_out = sizes[1], name in RESIDUAL_SUMS
    weight_bytes = TYPE_BYTES[kind]
    tiles = gemv_tiles(columns, gated=name == "gate_up", has_squares_out=has_squares_out, weight_bytes=weight_bytes)
    previous_block_n = gemv_tiles(columns, gated=False, has_squares_out=True, weight_bytes=weight_bytes).block_n
    epilogue = epilogue_types(fused_row_kernel, name, f"*{row}")
    scales = "*fp32" if weight_bytes == 1 else None
    numbers = dict.fromkeys(("N", "K", "num_squares"), "i32")
    constants = {
        "GATE": "silu" if name == "gate_up" else None, "EVEN_K": columns % tiles.block_k == 0,
        "SQUARES_BLOCK": squares_block(name, -(-columns // previous_block_n)),
        "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k,
    }  # fmt: skip
    return Compilation(
        f"fused_row_{label}",
        fused_row_kernel,
        {"x": f"*{row}", "weight": f"*{kind}", "weight_scales": scales, **epilogue, **numbers, "eps": "fp32", "alpha": "fp32"},
        constants,
        num_warps=tiles.num_warps,
        capabilities=(capability,),
        divisible=("N", "K", "num_squares"),
    )  # fmt: skip
