"""Configurations of `kernels.triton.sampling.greedy_head` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, TYPE_BYTES, Compilation
from kernels.triton.sampling.greedy_head import head_kernel, head_tiles, merge_argmax_kernel

PARTS = {"maxima": "*fp32", "tokens": "*i32"}


def compilations() -> list[Compilation]:
    """Vocabularies of Llama 3, Qwen3 and Gemma 3."""
    kinds = [("bf16", "bf16", CAPABILITIES), ("fp16", "fp16", (90,)), ("fp32", "fp32", (89,))]
    kinds += [("bf16", "i8", CAPABILITIES), ("bf16", "fp8e4nv", FP8_CAPABILITIES), ("fp32", "i8", (80, 90))]
    heads = [_compilation(rows, weight, capability) for rows, weight, cards in kinds for capability in cards]
    join = {**PARTS, "out": "*i64", "tiles": "i32"}
    joins = [
        Compilation(f"greedy_head: merge of {tiles}", merge_argmax_kernel, join, {"TILES": tiles}, num_warps=4)
        for tiles in (2048, 4096, 8192)
    ]
    return [*heads, *joins]


def _compilation(rows: str, weight: str, capability: int) -> Compilation:
    """`rows` and `weight` are types."""
    tiles = head_tiles(weight_bytes=TYPE_BYTES[weight], capability=capability, row_bytes=TYPE_BYTES[rows])
    scales = None if weight == rows else "*fp32"
    numbers = dict.fromkeys(("M", "V", "K", "hidden_stride", "weight_stride", "tiles"), "i32")
    return Compilation(
        f"greedy_head_{rows}_{weight}_sm{capability}",
        head_kernel,
        {"hidden": f"*{rows}", "weight": f"*{weight}", "scales": scales, **PARTS, **numbers},
        {"TOKENS": tiles.block_n, "COLUMNS": tiles.block_k},
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        capabilities=(capability,),
        tensor_cores=rows != "fp32",
        small_tile=True,
        divisible=("K", "hidden_stride", "weight_stride"),
    )
