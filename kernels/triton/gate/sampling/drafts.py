"""Configurations of `kernels.triton.sampling.drafts` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.sampling.drafts import BLOCK, NUM_WARPS, accept_drafts_kernel, emit_tokens_kernel, sample_residual_kernel


def compilations() -> list[Compilation]:
    """Up to 15 draft tokens."""
    shared = {"target": "*fp32", "draft": "*fp32", "num_guesses": "*i32", "streams": "*i64", "positions": "*i64"}
    parts = {"accepted": "*i32", "scores": "*fp32", "tokens": "*i32"}
    numbers = {"V": "i32", "max_guesses": "i32"}
    return [
        Compilation(
            "reject_drafts: accept",
            accept_drafts_kernel,
            shared | {"guesses": "*i64", "accepted": "*i32"} | numbers,
            {},
            num_warps=1,
            fp_fusion=False,
        ),
        Compilation(
            "reject_drafts: sample residual",
            sample_residual_kernel,
            shared | parts | numbers | {"blocks": "i32"},
            {"BLOCK": BLOCK},
            num_warps=NUM_WARPS,
            fp_fusion=False,
        ),
        Compilation(
            "reject_drafts: emit tokens",
            emit_tokens_kernel,
            parts | {"guesses": "*i64", "out": "*i64", "max_guesses": "i32", "splits": "i32"},
            {"SPLITS": 128, "WIDTH": 16},
            num_warps=1,
        ),
    ]
