"""Products with 16-bit weights for a few rows of x: each weight is read once, at the speed of the card's memory."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch.nn import functional

from kernels.fusible_products import FusibleProduct
from kernels.operations import FUSED_ROWS_MAX
from kernels.triton.launching.card_properties import capability, card, multiprocessors
from kernels.triton.products.tiles import Tiles, cheapest_tiles, launch

CANDIDATES = Tiles(16, 64, 128, num_warps=4, num_stages=6), Tiles(16, 128, 128, num_warps=4, num_stages=3)
"""16 or 32 KiB of weights per step; warps are side by side over the outputs."""


class PlainLinear(FusibleProduct):
    """The product [T, in] → [T, out] with a matrix of 16 or 32 bits as loaded from the checkpoint, by `linear`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, bias=self.bias)


def linear(
    x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """out[m, n] = Σ_k x[m, k] · weight[n, k] + bias[n]; x: [M, K], weight: [N, K], bias: [N], all of one type → [M, N]

    For M ≤ 16, a memory-bound kernel: tiles of 16 rows for the tensor cores whatever M is, so a row has the same bits in any of
    these batches; up to six loads of 16 KiB in flight per program; and split-K if the matrix alone has too few tiles (arXiv
    2402.00025; the reduction of split_k.py does not depend on timing). Above, cuBLAS. Reads 2·N·K bytes once and
    x from the L2 cache, writes 2·M·N; 2·M·N·K operations. Rows beyond M, columns beyond N and K are masked. Accumulates in
    float32.
    """
    if x.shape[0] > FUSED_ROWS_MAX:
        return functional.linear(x, weight, bias) if out is None else cublas(x, weight, bias, out)
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    if not x.shape[0]:
        return out
    shape = weight.shape[0], weight.shape[1]
    tiles = skinny_tiles(*shape, capability(x.device), multiprocessors(x.device), weight.element_size())
    return launch(x, weight, tiles, out, bias=bias)


def cublas(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """x Wᵀ + bias by cuBLAS; its result is written to `out`, [M, N], whose rows need not adjoin each other."""
    return torch.mm(x, weight.T, out=out) if bias is None else torch.addmm(bias, x, weight.T, out=out)


@functools.cache
def skinny_tiles(num_outputs: int, num_columns: int, capability: int, multiprocessors: int, weight_bytes: int = 2) -> Tiles:
    """The cheapest of `skinny_candidates`; the same for any number of rows. Weights of 32 bits are split as those of 16."""
    return cheapest_tiles(skinny_candidates(capability, weight_bytes), (num_outputs, num_columns), multiprocessors, 2)


def skinny_candidates(capability: int, weight_bytes: int) -> list[Tiles]:
    """CANDIDATES, with fewer loads in flight on cards with 100 KiB of shared memory; for float32 only the narrow tile, with
    three, because more or wider loads exceed the shared memory of some cards."""
    if weight_bytes == 4:
        return [replace(CANDIDATES[0], num_stages=3)]
    stages_max = 4 if card(capability).is_small else 6
    return [replace(tiles, num_stages=min(tiles.num_stages, stages_max)) for tiles in CANDIDATES]
