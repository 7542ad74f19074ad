"""Configurations of `kernels.triton.sampling.logprobs` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.sampling.logprobs import BLOCK, IDS_MIN, NUM_WARPS, merge_logprobs_kernel, partial_logprobs_kernel


def compilations() -> list[Compilation]:
    """Chosen token and up to 20 likeliest ones, of vocabularies of Llama 3, Qwen3 and Gemma 3."""
    parts = {"maxima": "*fp32", "sums": "*fp32", "larger": "*i32"}
    strides = {"logits_stride": "i32", "ids_stride": "i32"}
    found = []
    for dtype in ("fp32", "bf16"):
        inputs = {"logits": f"*{dtype}", "ids": "*i64", **parts, **strides}
        found.append(
            Compilation(
                f"token_logprobs: partial, {dtype}",
                partial_logprobs_kernel,
                inputs | {"V": "i32", "blocks": "i32"},
                {"BLOCK": BLOCK},
                num_warps=NUM_WARPS,
                fp_fusion=False,
            )
        )
        found += [
            Compilation(
                f"token_logprobs: merge of {splits}, {dtype}",
                merge_logprobs_kernel,
                inputs | {"logprobs": "*fp32", "ranks": "*i32", "num_ids": "i32", "splits": "i32"},
                {"SPLITS": splits, "IDS": IDS_MIN},
                num_warps=1,
                fp_fusion=False,
            )
            for splits in (32, 64, 128)
        ]
    return found
