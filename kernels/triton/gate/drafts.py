"""Configurations of `kernels.triton.drafts` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.drafts import BLOCK, NUM_WARPS, draw_kernel, judge_kernel, settle_kernel
from kernels.triton.gate.compilation import Compilation


def compilations() -> list[Compilation]:
    """Up to 15 guesses."""
    shared = {"target": "*fp32", "draft": "*fp32", "num_guesses": "*i32", "streams": "*i64", "positions": "*i64"}
    parts = {"accepted": "*i32", "scores": "*fp32", "tokens": "*i32"}
    numbers = {"V": "i32", "max_guesses": "i32"}
    return [
        Compilation(
            "reject_drafts: judge",
            judge_kernel,
            shared | {"guesses": "*i64", "accepted": "*i32"} | numbers,
            {},
            num_warps=1,
            fp_fusion=False,
        ),
        Compilation(
            "reject_drafts: draw",
            draw_kernel,
            shared | parts | numbers | {"blocks": "i32"},
            {"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
            fp_fusion=False,
        ),
        Compilation(
            "reject_drafts: settle",
            settle_kernel,
            parts | {"guesses": "*i64", "out": "*i64", "max_guesses": "i32", "splits": "i32"},
            {"SPLITS": 128, "WIDTH": 16},
            num_warps=1,
        ),
    ]
