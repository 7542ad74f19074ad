"""Launches Hopper's kernels for few rows, `fused_byte_rows` and `fused_int4_rows`. Imports Gluon only to launch."""

from __future__ import annotations

import torch

from kernels.alternatives import HOPPER, TILES, serving_product
from kernels.quantised_weights import Fp8Weight, Int4Weight, Int8Weight
from kernels.triton.products.epilogue import Epilogue
from kernels.triton.products.hopper_tiles import HopperTiles, supported_separate_tiles, weight_bits


def launch(x: torch.Tensor, weight: Int8Weight | Fp8Weight | Int4Weight, epilogue: Epilogue, tiles: HopperTiles) -> None:
    """Multiplies x: [M, K] of 16 bits, columns in the checkpoint's order, in its rows contiguous, and stores what the epilogue
    has."""
    if isinstance(weight, Int4Weight):
        from kernels.triton.products.fused_int4_rows import launch_int4_rows

        launch_int4_rows(x if weight.permutation is None else x.index_select(1, weight.permutation), weight, epilogue, tiles)
    else:
        from kernels.triton.products.fused_byte_rows import launch_byte_rows

        launch_byte_rows(x, weight, epilogue, tiles)


def multiply_few_rows(
    x: torch.Tensor, weight: Int8Weight | Fp8Weight | Int4Weight, bias: torch.Tensor | None, out: torch.Tensor
) -> bool:
    """Writes x Wᵀ + bias to `out`, [M, N], and returns True if Hopper's kernels serve the product and store rows as they lie in
    `out`; otherwise returns False."""
    tiles = supported_separate_tiles(x, weight, out.shape[1]) if out.is_contiguous() else None
    if tiles is None or serving_product(weight_bits(weight), x.shape[0], HOPPER, TILES) != HOPPER:
        return False
    assert x.stride(1) == 1, "rows of x are contiguous"
    launch(x, weight, Epilogue(out=out, bias=bias), tiles)
    return True
