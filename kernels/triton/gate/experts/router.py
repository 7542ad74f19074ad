"""Configurations of `kernels.triton.experts.router` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.experts.router import num_router_warps, route_kernel
from kernels.triton.gate.compilation import Compilation
from kernels.triton.launching.card_properties import power_of_two


def compilations() -> list[Compilation]:
    """Qwen3-30B-A3B in decode steps and prefills, Mixtral 8x7B, and 16 of 512 experts with weights not normalised."""
    return [
        _compilation("bf16", 128, 8),
        _compilation("bf16", 128, 8, has_slots=False),
        _compilation("fp16", 8, 2),
        _compilation("fp32", 512, 16, normalised=False),
    ]


def _compilation(dtype: str, experts: int, chosen: int, *, normalised: bool = True, has_slots: bool = True) -> Compilation:
    block = power_of_two(experts)
    slots = {"slots": "*i64"} if has_slots else {}
    return Compilation(
        f"route_{dtype}_{experts}experts_{chosen}{'' if has_slots else '_texts'}",
        route_kernel,
        {"logits": f"*{dtype}", **slots, "weights": f"*{dtype}", "expert_ids": "*i64", "row_stride": "i32"},
        {
            **({} if has_slots else {"slots": None}), "EXPERTS": experts, "EXPERTS_BLOCK": block, "CHOSEN": chosen,
            "CHOSEN_BLOCK": power_of_two(chosen), "NORMALISED": normalised,
        },
        num_warps=num_router_warps(block), divisible=("row_stride",) if experts % 16 == 0 else (),
    )  # fmt: skip
