"""Matrix products whose rows do not depend on how many rows are computed together.

A library chooses its blocking, and with it the order of additions, by the number of rows. So rows are multiplied in tiles of
fixed sizes, the last one padded with zeros, and only sizes are used that gave the same bits for the same row, at every place in
the tile, when tried. A row then has the same result in any batch (the approach of arXiv 2506.09501 and of "Defeating
nondeterminism in LLM inference", Thinking Machines Lab, 2025, for libraries whose kernels cannot be changed).
"""

from __future__ import annotations

import torch

from kernels.operations import LinearKernel

TILE_ROWS = (64, 16, 4)
"""Sizes to try, from the cheapest per row to the one that costs no more than a single row."""


def in_agreeing_tiles(multiply: LinearKernel, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> LinearKernel:
    """The product `multiply` for rows of `num_columns`, computed in tiles of the sizes that agree on this machine."""
    sizes = agreeing_sizes(multiply, num_columns, dtype=dtype, device=device)
    return lambda x: _in_tiles(multiply, x, sizes)


def agreeing_sizes(multiply: LinearKernel, num_columns: int, *, dtype: torch.dtype, device: torch.device) -> tuple[int, ...]:
    """Sizes of `TILE_ROWS`, largest first, that give each of some random rows the same bits as the smallest one does.

    A single row at a time, if the smallest size itself gives a row different bits at different places.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(TILE_ROWS[0], num_columns, generator=generator).to(device=device, dtype=dtype)
    smallest = TILE_ROWS[-1]
    expected = _in_tiles(multiply, rows, (smallest,))
    turned = _in_tiles(multiply, rows.roll(1, 0), (smallest,)).roll(-1, 0)
    if not torch.equal(expected, turned):
        return (1,)
    return tuple(size for size in TILE_ROWS if torch.equal(expected, _in_tiles(multiply, rows, (size,))))


def _in_tiles(multiply: LinearKernel, x: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
    """x: [T, columns]; as many full tiles of the largest size as possible, and so on, at the end a padded one of the
    smallest."""
    num_rows, first = x.shape[0], 0
    parts: list[torch.Tensor] = []
    for size in sizes:
        while num_rows - first >= size:
            parts.append(multiply(x[first : first + size]))
            first += size
    if first < num_rows:
        tile = x.new_zeros(sizes[-1], x.shape[1])
        tile[: num_rows - first] = x[first:]
        parts.append(multiply(tile)[: num_rows - first])
    return parts[0] if len(parts) == 1 else torch.cat(parts)
