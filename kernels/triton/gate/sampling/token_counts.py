"""Configurations of `kernels.triton.sampling.token_counts` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.sampling.token_counts import ROWS, count_tokens_kernel


def compilations() -> list[Compilation]:
    """One configuration serves all."""
    signature = {"slots": "*i32", "tokens": "*i64", "counts": "*i32", "num_rows": "i32", "V": "i32"}
    return [Compilation("count_tokens", count_tokens_kernel, signature, {"ROWS": ROWS})]
