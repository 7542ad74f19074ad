"""Configurations of `kernels.triton.step.embedding` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.launching.card_properties import power_of_two
from kernels.triton.step.embedding import BLOCK_MAX, embed_kernel, rotation_rows_kernel, rotation_rows_tile


def compilations() -> list[Compilation]:
    """Widths of Llama-3.1-8B and Qwen3-0.6B, and Gemma's multiplier; heads of 64 and 128."""
    return [
        *(_embedding(width, scaled=False) for width in (1024, 4096)),
        _embedding(2304, scaled=True),
        *(_rotation(width) for width in (64, 128)),
    ]


def _embedding(width: int, *, scaled: bool) -> Compilation:
    return Compilation(
        f"embed_bf16_{width}{'_scaled' if scaled else ''}",
        embed_kernel,
        {"token_ids": "*i64", "table": "*bf16", "out": "*bf16", "multiplier": "fp32"},
        {"WIDTH": width, "BLOCK": min(BLOCK_MAX, power_of_two(width)), "SCALED": scaled},
    )


def _rotation(width: int) -> Compilation:
    tensors = dict.fromkeys(("cos", "sin", "cos_out", "sin_out"), "*bf16")
    return Compilation(
        f"rotation_rows_bf16_{width}",
        rotation_rows_kernel,
        {**tensors, "positions": "*i64", "num_rows": "i32"},
        {"WIDTH": width, "BLOCK": power_of_two(width), "ROWS": rotation_rows_tile(power_of_two(width))},
        num_warps=1,
    )
