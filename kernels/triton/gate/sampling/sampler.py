"""Configurations of `kernels.triton.sampling.sampler` that the compile gate compiles."""

from __future__ import annotations

from typing import Any

from kernels.triton.gate.compilation import Compilation
from kernels.triton.sampling.sampler import LIST_SIZE, NUM_WARPS, padded_sizes, scan_kernel, select_kernel, sum_weights_kernel

_TYPES = {
    "slots": "*i32", "positions": "*i64", "group_maxima": "*fp32", "best_scores": "*fp32", "best_tokens": "*i32",
    "weights": "*i64", "groups": "*i32", "candidate_logits": "*fp32", "candidate_ids": "*i32", "out": "*i64", "scales": "*fp32",
    "streams": "*i64", "top_ks": "*i32", "top_ps": "*fp32", "neg_log2_min_ps": "*fp32", "typical_ps": "*fp32",
    "repetition": "*fp32", "frequency": "*fp32", "presence": "*fp32", "counts": "*i32", "min_tokens_until": "*i64",
    "suppressed_ids": "*i32", "rules": "*i32", "bias": "*fp32",
    "logits_stride": "i32", "masks_stride": "i32", "V": "i32", "G": "i32", "tiles": "i32", "num_splits": "i32",
}  # fmt: skip
KINDS = (
    ("bf16", 128_256, False), ("bf16", 128_256, True), ("bf16", 151_936, False), ("bf16", 151_936, True),
    ("bf16", 262_208, False), ("bf16", 262_208, True), ("fp32", 128_256, False),
    ("fp32", 128_256, True),
)  # fmt: skip
"""Type of the logits (float32 in batch-invariant steps); vocabularies of Llama 3, Qwen3 and Gemma 3; whether there is a
grammar."""


def compilations() -> list[Compilation]:
    """One for each of KINDS; a kernel that does not depend on sizes only once."""
    found: dict[str, Compilation] = {}
    for kernel in (scan_kernel, sum_weights_kernel, select_kernel):
        for kind in KINDS:
            compilation = _compilation(kernel, *kind)
            found.setdefault(compilation.name, compilation)
    return list(found.values())


def _compilation(kernel: Any, dtype: str, vocab_size: int, has_grammar: bool) -> Compilation:
    groups, splits = padded_sizes(vocab_size)
    sizes: dict[str, object] = {"GROUPS_PADDED": groups, "SPLITS": splits, "LIST_SIZE": LIST_SIZE}
    signature = {name: _TYPES[name] for name in kernel.arg_names if name in _TYPES} | {"logits": f"*{dtype}"}
    constexprs = {name: size for name, size in sizes.items() if name in kernel.arg_names}
    if has_grammar:
        signature["masks"] = "*i32"
    else:
        constexprs["masks"] = None
    step = kernel.__name__.removesuffix("_kernel")
    padded = f", {groups} groups" if "GROUPS_PADDED" in constexprs else ""
    name = f"sample: {step}, {dtype}{padded}{', grammar' if has_grammar else ''}"
    # The assembler spills a few bytes outside the loops to fit one more program on a multiprocessor.
    return Compilation(
        name,
        kernel,
        signature,
        constexprs,
        num_warps=NUM_WARPS,
        num_stages=2,
        spill_bytes_max=128,
        fp_fusion=False,
        divisible=("logits_stride", "V"),
    )
