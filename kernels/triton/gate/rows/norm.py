"""Configurations of `kernels.triton.rows.norm` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import CAPABILITIES, FP8_CAPABILITIES, Compilation
from kernels.triton.rows.norm import rms_norm_kernel
from kernels.triton.rows.tiles import row_tile


def compilations() -> list[Compilation]:
    """The residual stream of Llama-3.1-8B, Llama-3.2-1B and Qwen3-0.6B, a wide one, Gemma's norms, heads of 128."""
    plain = [
        _compilation(f"{dtype}_{width}", dtype, width, residual=residual)
        for dtype, widths in (("bf16", (1024, 2048, 4096, 8192)), ("fp16", (4096,)))
        for width in widths
        for residual in (False, True)
    ]
    return [
        *plain,
        _compilation("bf16_128", "bf16", 128),
        _compilation("bf16_2560", "bf16", 2560, residual=True),
        _compilation("bf16_16384", "bf16", 16384, residual=True),
        _compilation("gemma_bf16_2048", "bf16", 2048, residual=True, branch_weight="fp32", weight="fp32"),
        _compilation("olmo_bf16_4096", "bf16", 4096, residual=True, branch_weight="bf16", weight=None),
        _compilation("fp8_bf16_4096", "bf16", 4096, fp8=True),
        _compilation("add_fp8_bf16_4096", "bf16", 4096, residual=True, fp8=True),
        _compilation("add_fp8_bf16_8192", "bf16", 8192, residual=True, fp8=True),
    ]


def _compilation(
    name: str,
    dtype: str,
    width: int,
    *,
    residual: bool = False,
    weight: str | None = "",
    branch_weight: str | None = None,
    fp8: bool = False,
) -> Compilation:
    tile = row_tile(width)
    stored = "fp8e4nv" if fp8 else dtype
    tensors: dict[str, str | None] = {
        "x": dtype,
        "residual": dtype if residual else None,
        "weight": dtype if weight == "" else weight,
        "branch_weight": branch_weight,
        "normed": None if weight is None else stored,
        "total": dtype if residual else None,
        "scales": "fp32" if fp8 else None,
    }
    numbers = {"num_rows": "i32", "x_stride": "i32", "residual_stride": "i32", "normed_stride": "i32"}
    return Compilation(
        f"{'add_' if residual else ''}rms_norm_{name}",
        rms_norm_kernel,
        {key: kind and f"*{kind}" for key, kind in tensors.items()} | numbers | {"eps": "fp32", "alpha": "fp32"},
        {"WIDTH": width, "BLOCK": tile.block, "ROWS": tile.rows},
        num_warps=tile.num_warps,
        capabilities=FP8_CAPABILITIES if fp8 else CAPABILITIES,
        divisible=("x_stride", "residual_stride", "normed_stride"),
    )
