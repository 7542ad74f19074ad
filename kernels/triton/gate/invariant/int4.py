"""Configurations of `kernels.triton.invariant.int4` that the compile gate compiles."""

from __future__ import annotations

from kernels.triton.gate.compilation import Compilation
from kernels.triton.gate.invariant.linear import SPILL_BYTES_MAX
from kernels.triton.invariant.int4 import invariant_int4_kernel, invariant_int4_tiles


def compilations() -> list[Compilation]:
    """Groups of 128 and 32, with splits; of 128 without them too."""
    variants = ((80, "bf16", 128), (89, "bf16", 128), (90, "bf16", 128), (90, "fp16", 32), (100, "bf16", 128))
    return [_compilation(*each) for each in variants] + [_compilation(90, "bf16", 128, splits) for splits in (1, 8)]


def _compilation(capability: int, dtype: str, group: int, splits: int = 4) -> Compilation:
    tiles = invariant_int4_tiles(4096, 4096, 132)
    sizes = ("N", "K", "stride_x", "stride_out")
    return Compilation(
        f"invariant_int4_{dtype}_group{group}_split{splits}_sm{capability}",
        invariant_int4_kernel,
        {
            "x_ptr": f"*{dtype}", "words_ptr": "*i16", "scales_zeros_ptr": "*i32", "out_ptr": f"*{dtype}",
            "partials_ptr": "*fp32", "counters_ptr": "*i32", "bias_ptr": None,
            **dict.fromkeys(("M", *sizes, "num_chunks", "split_chunks"), "i32"),
        },
        {
            "GROUP": group, "BFLOAT_SCALES": False, "EVEN_K": True, "SPLITS": splits,
            "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "STAGES": tiles.num_stages,
        },
        tiles.num_warps, tiles.num_stages, (capability,), tensor_cores=True, divisible=sizes, spill_bytes_max=SPILL_BYTES_MAX,
        fp_fusion=False,
    )  # fmt: skip
