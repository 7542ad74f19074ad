"""Matrix products whose rows do not depend on how many rows are computed together.

A library chooses its blocking, and with it the order of additions, by the number of rows. So rows are multiplied in tiles of
fixed sizes, the last one padded with zeros, and only those sizes are used that, when tried, gave the same row the same bits at
every position in the tile. A row then has the same result in any batch (the approach of arXiv 2506.09501 and of "Defeating
nondeterminism in LLM inference", Thinking Machines Lab, 2025, for libraries whose kernels cannot be changed).
"""

from __future__ import annotations

import torch

from kernels.operations import LinearKernel

TILE_ROWS = (64, 16, 4)
"""Sizes to try, from the cheapest per row to the one that costs no more than a single row."""


def in_invariant_tiles(multiply: LinearKernel, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> LinearKernel:
    """The product `multiply` for rows of `num_columns`, computed in tiles of `invariant_tile_sizes`."""
    sizes = invariant_tile_sizes(multiply, num_columns, dtype=dtype, device=device)
    return lambda x: _in_tiles(multiply, x, sizes)


def invariant_tile_sizes(
    multiply: LinearKernel, num_columns: int, *, dtype: torch.dtype, device: torch.device
) -> tuple[int, ...]:
    """Sizes of `TILE_ROWS`, largest first, that give each of some random rows the same bits as the smallest one does.

    (1,), a single row at a time, if even the smallest size gives a row different bits at different positions.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TILE_ROWS[0], num_columns, generator=generator).to(device=device, dtype=dtype)
    smallest = TILE_ROWS[-1]
    expected = _in_tiles(multiply, rows, (smallest,))
    shifted = _in_tiles(multiply, rows.roll(1, 0), (smallest,)).roll(-1, 0)
    if not torch.equal(expected, shifted):
        return (1,)
    return tuple(size for size in TILE_ROWS if torch.equal(expected, _in_tiles(multiply, rows, (size,))))


def _in_tiles(multiply: LinearKernel, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """x: [T, columns]; as many full tiles of the largest size as possible, and so on, at the end a padded one of the
    smallest."""
    num_rows, first = x.shape[0], 0
    products: list[torch.Tensor] = []
    for size in sizes:
        while num_rows - first >= size:
            products.append(multiply(x[first : first + size]))
            first += size
    if first < num_rows:
        tile = x.new_zeros(sizes[-1], x.shape[1])
        tile[: num_rows - first] = x[first:]
        products.append(multiply(tile)[: num_rows - first])
    return products[0] if len(products) == 1 else torch.cat(products)
