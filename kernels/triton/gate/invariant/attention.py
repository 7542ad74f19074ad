"""Configurations of `kernels.triton.invariant.attention` that the compile gate compiles."""

from __future__ import annotations

from dataclasses import replace

from kernels.attention_rows import AttentionShape
from kernels.triton.attention.chunk_splits import FEW_REQUESTS
from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, TYPE_BYTES, Compilation
from kernels.triton.invariant.attention import MERGE_UNROLL, MERGE_WARPS, merge_constants, rows_constants, rows_tiling
from kernels.triton.invariant.attention_kernels import SIZES, merge_rows_kernel, rows_kernel

SPILL_BYTES_MAX = 64
H200 = (90,)


def compilations() -> list[Compilation]:
    """Llama-3.1-8B (and Qwen3-8B) and Llama-3.2-1B in bf16 and with an fp8 cache for every card; all other heads, windows and
    caps for an H200; the second kernel."""
    llama, small_llama = AttentionShape(16, 32, 8, 128), AttentionShape(16, 32, 8, 64)
    gemma = AttentionShape(16, 8, 4, 256, sliding_window=4096, softcap=50.0)
    configurations = []
    for name, shape in {"llama-8b": llama, "llama-1b": small_llama}.items():
        configurations += _compilations(f"{name} bf16", shape, "bf16", "bf16", CAPABILITIES)
        configurations += _compilations(f"{name} fp8e4nv", shape, "bf16", "fp8e4nv", FP8_CAPABILITIES)
    others = {
        "qwen-0.6b": AttentionShape(16, 16, 8, 128),
        "window": replace(llama, sliding_window=4096),
        "head size 96": AttentionShape(16, 32, 32, 96),
        "window and soft-cap": gemma,
        "7 heads": AttentionShape(16, 28, 4, 128),
    }
    for name, shape in others.items():
        configurations += _compilations(name, shape, "bf16", "bf16", H200)
    configurations += _compilations("llama-8b bf16, few requests", llama, "bf16", "bf16", H200, requests=FEW_REQUESTS)
    configurations += _compilations("float32, window and soft-cap", gemma, "fp32", "fp32", H200)
    configurations += [
        _merge_compilation(f"merge of rows, {name}", shape) for name, shape in {"llama-8b": llama, **others}.items()
    ]
    configurations.append(_merge_compilation("merge of rows, llama-8b, few requests", llama, requests=FEW_REQUESTS))
    return configurations


def _compilations(
    name: str, shape: AttentionShape, dtype: str, kv: str, capabilities: tuple[int, ...], *, requests: int = 256
) -> list[Compilation]:
    tensors: dict[str, str | None] = {"q": f"*{dtype}", "kv_cache": f"*{kv}", "kv_scales": "*fp32" if "fp8" in kv else None}
    tensors |= {"out": f"*{dtype}", "partial_acc": "*fp32", "partial_stats": "*fp32"}
    tensors |= dict.fromkeys(("block_tables", "query_starts", "context_lens"), "*i32")
    numbers = dict.fromkeys((*SIZES, "num_tiles", "q_stride", "block_stride", "table_stride"), "i32")
    configurations = []
    for number in capabilities:
        tiling = rows_tiling(shape.head_dim, TYPE_BYTES[kv], shape.group, number)
        configurations.append(
            Compilation(
                f"invariant rows {name}, {tiling.keys} keys by {tiling.num_warps} warps, sm{number}",
                rows_kernel,
                tensors | numbers | {"scale": "fp32"},
                {**rows_constants(shape, tiling), "REQUESTS": requests},
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
                capabilities=(number,),
                tensor_cores=kv != "fp32",
                spill_bytes_max=SPILL_BYTES_MAX,
                divisible=("q_stride", "block_stride"),
                fp_fusion=False,
            )
        )
    return configurations


def _merge_compilation(name: str, shape: AttentionShape, *, requests: int = 256) -> Compilation:
    tensors: dict[str, str | None] = {"out": "*bf16", "partial_acc": "*fp32", "partial_stats": "*fp32", "kv_scales": None}
    tensors |= {"query_starts": "*i32", "context_lens": "*i32"}
    return Compilation(
        name,
        merge_rows_kernel,
        tensors | dict.fromkeys(SIZES, "i32"),
        {"UNROLL": MERGE_UNROLL, "REQUESTS": requests, **merge_constants(shape)},
        num_warps=MERGE_WARPS,
        capabilities=(90, 100),
        spill_bytes_max=SPILL_BYTES_MAX,
        fp_fusion=False,
    )
