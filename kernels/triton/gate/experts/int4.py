"""Configurations of `kernels.triton.experts.int4` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.experts.int4 import group_int4_tiles, grouped_int4_kernel
from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.products.tiles import SPILL_BYTES_MAX


def compilations() -> list[Compilation]:
    """Qwen3-30B-A3B (128 experts, 8 chosen) in groups of 128, decode step to prefill; smaller groups in the lowest tile."""
    all_cards, h200 = (16, 64, 512), (16, 32, 64, 512)
    variants = [(80, 128, all_cards), (89, 128, all_cards), (90, 128, h200), (90, 32, (16,)), (100, 128, all_cards)]
    return [
        _compilation(capability, group, tokens_per_expert, activation)
        for capability, group, tokens_per_experts in variants
        for tokens_per_expert in tokens_per_experts
        for activation in ("silu", "")
    ]


def _compilation(capability: int, group: int, tokens_per_expert: int, activation: str) -> Compilation:
    tiles = group_int4_tiles(tokens_per_expert, capability, gated=activation != "")
    sizes = ("N", "K", "stride_x", "stride_out")
    return Compilation(
        f"grouped_{'gated' if activation else 'down'}_int4_group{group}_128experts_{tokens_per_expert * 128}_sm{capability}",
        grouped_int4_kernel,
        {
            "x_ptr": "*bf16", "words_ptr": "*i64", "scales_zeros_ptr": "*i64", "order_ptr": "*i32", "offsets_ptr": "*i32",
            "out_ptr": "*bf16", "factors_ptr": None if activation else "*bf16",
            **dict.fromkeys((*sizes, "num_chunks", "row_tiles"), "i32"),
        },
        {
            "NUM_CHOSEN": 8, "ACTIVATION": activation, "EXPERTS": 128,
            "EXPERTS_BLOCK": 128, "GROUP": group, "BFLOAT_SCALES": False, "EVEN_K": True, "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages,
        },
        tiles.num_warps, tiles.num_stages, (capability,), tensor_cores=True, small_tile=tiles.block_m < 64, divisible=sizes,
        spill_bytes_max=SPILL_BYTES_MAX,
    )  # fmt: skip
