"""Configurations of `kernels.triton.experts.mixture` that the compile gate compiles."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from kernels.triton.experts.mixture import COMBINE_BLOCK, combine_kernel, grouped_kernel
from kernels.triton.experts.tiles import SORT_BLOCK, group_tiles, sort_kernel
from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.products.tiles import SPILL_BYTES_MAX
from kernels.triton.launching.card_properties import power_of_two


def compilations() -> list[Compilation]:
    """Qwen3-30B-A3B (128 experts, 8 chosen) and Mixtral 8x7B (8, 2), from a decode step to a prefill; batch-invariant engines
    use the tiles for 64 tokens per expert for any number."""
    variants: list[tuple[str, int, int, int, tuple[int, ...], Any]] = [
        ("bf16", 80, 128, 8, (16, 32, 64, 512), None),
        ("bf16", 89, 128, 8, (16, 32, 64, 512), None),
        ("bf16", 90, 128, 8, (16, 32, 64, 512), None),
        ("fp16", 90, 8, 2, (16, 512), None),
        ("bf16", 100, 128, 8, (16, 32, 64, 512), None),
        ("bf16", 80, 128, 8, (16, 32, 64, 512), tl.int8),
        ("bf16", 90, 128, 8, (16, 32, 64, 512), tl.int8),
        ("bf16", 89, 128, 8, (16, 32, 64, 512), tl.float8e4nv),
        ("bf16", 90, 128, 8, (16, 32, 64, 512), tl.float8e4nv),
        ("bf16", 100, 128, 8, (16, 32, 64, 512), tl.float8e4nv),
    ]
    launches = [
        _compilation(dtype, capability, experts, chosen, tokens_per_expert * experts, activation, codes)
        for dtype, capability, experts, chosen, tokens_per_experts, codes in variants
        for tokens_per_expert in tokens_per_experts
        for activation in ("silu", "")
    ]
    assignments, floats = {"num_assignments": "i32", "offsets_ptr": "*i32"}, {"expert_out_ptr": "*bf16", "out_ptr": "*bf16"}
    return [
        *launches,
        Compilation(
            "sort_by_expert_128",
            sort_kernel,
            {"expert_ids_ptr": "*i64", "order_ptr": "*i32", **assignments},
            {"EXPERTS": 128, "BLOCK": SORT_BLOCK},
        ),
        Compilation(
            "combine_experts_8",
            combine_kernel,
            {**floats, "expert_ids_ptr": "*i64", **dict.fromkeys(("num_experts", "width", "stride_out"), "i32")},
            {"NUM_CHOSEN": 8, "BLOCK": COMBINE_BLOCK},
            divisible=("width", "stride_out"),
        ),
    ]


def _compilation(
    dtype: str, capability: int, experts: int, chosen: int, assignments: int, activation: str, codes: Any
) -> Compilation:
    tiles = group_tiles(assignments / experts, capability, gated=activation != "")
    sizes = ("N", "K", "stride_x", "stride_weight", "stride_out")
    stored = "" if codes is None else f"_{codes.name}"
    return Compilation(
        f"grouped_{'gated' if activation else 'down'}_{dtype}{stored}_{experts}experts_{assignments}_sm{capability}",
        grouped_kernel,
        {
            "x_ptr": f"*{dtype}", "weights_ptr": "*i64", "order_ptr": "*i32", "offsets_ptr": "*i32",
            "out_ptr": f"*{dtype}", "factors_ptr": None if activation else f"*{dtype}",
            "scales_ptr": None if codes is None else "*i64", **dict.fromkeys((*sizes, "row_tiles"), "i32"),
        },
        {
            "NUM_CHOSEN": chosen, "ACTIVATION": activation, "CODE_DTYPE": codes,
            "EXPERTS": experts, "EXPERTS_BLOCK": power_of_two(experts), "EVEN_K": True, "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n, "BLOCK_K": tiles.block_k, "STAGES": tiles.num_stages,
        },
        tiles.num_warps, tiles.num_stages, (capability,), tensor_cores=True, small_tile=tiles.block_m < 64, divisible=sizes,
        spill_bytes_max=SPILL_BYTES_MAX,
    )  # fmt: skip
