"""Matrix products with weights that are packed once into panels: x Wᵀ + b.

A panel holds as many of W's rows as a tile has columns, interleaved number by number, padded with zeros at the end of W: [in,
columns]. The threads divide the panels; each panel is read once from memory, in order, for all rows of x, tile by tile from the
cache.
While tiles are computed the next panel is fetched. oneDNN, which torch would call, takes 1.05 to 3 times as long (ADR 28).

Moves |W| + |x| + |out| bytes for 2 · T · |W| operations; sums in float32, each in the order of its columns (see `tiles`), so
that a row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from llvmlite import binding

from kernels.simd.compiling import entry, part, task
from kernels.simd.large_pages import on_large_pages
from kernels.simd.launching import Launch, new
from kernels.simd.threads import argument, run, share
from kernels.simd.tiles import (
    CACHE_LINE,
    ROWS,
    WIDE,
    WIDEST,
    multiply,
    multiply_fetching,
    multiply_widest,
    multiply_widest_fetching,
)
from kernels.simd.vectors import BYTES, LANES, get, put, stack

COLUMNS, COLUMNS_WIDEST = WIDE * LANES, WIDEST * LANES
OUTPUTS_WIDEST = 768
"""From this many outputs on a panel has COLUMNS_WIDEST; fewer panels of a smaller matrix would be divided unevenly."""

DEPTH = 1024
"""Columns of W that a panel's tiles process at a time: the weights read, and as many prefetched, stay in a core's cache."""

ROWS_FETCHING = ROWS + 1 if binding.get_host_cpu_name().startswith("znver") else 3
"""Rows from which the next panel is prefetched. With fewer the hardware foresees the reads. AMD's processors do so with all
rows of a tile: lines requested twice cost a tenth there. On Intel's a tile of 3 to 8 rows gains a fifth."""

_edge = stack(ROWS * COLUMNS_WIDEST)


@part
def _tile(columns, fetches, rows, x, num_columns, weights, depth, start, start_stride, out, out_stride, ahead):
    """A tile of a panel with `columns` columns; if it `fetches`, each step prefetches a line from `ahead` on."""
    if columns == COLUMNS:
        if fetches:
            multiply_fetching(rows, x, num_columns, weights, columns, depth, start, start_stride, out, out_stride, ahead)
        else:
            multiply(rows, x, num_columns, weights, columns, depth, start, start_stride, out, out_stride, 0)
    elif fetches:
        multiply_widest_fetching(rows, x, num_columns, weights, columns, depth, start, start_stride, out, out_stride, ahead)
    else:
        multiply_widest(rows, x, num_columns, weights, columns, depth, start, start_stride, out, out_stride, 0)


@part
def _inner_panel(x, num_columns, panel, columns, bias, out, out_stride, num_rows):
    """out: the first row's place in the panel's columns. Tiles have nearly equal numbers of rows. Of the lines to prefetch in a
    step, the first tile takes one, the next tile the next one: memory is accessed evenly while all tiles are computed, not in
    bursts between pauses."""
    lines = columns * BYTES // CACHE_LINE if num_rows >= ROWS_FETCHING else 0
    num_tiles = (num_rows + ROWS - 1) // ROWS
    rows = (num_rows + num_tiles - 1) // num_tiles
    for first in range(0, num_columns, DEPTH):
        depth = min(DEPTH, num_columns - first)
        weights = panel + first * columns * BYTES
        behind = weights + depth * columns * BYTES
        start, start_stride = (out, out_stride) if first else (bias, 0)
        for row in range(0, num_rows, rows):
            line = row // rows
            _tile(
                columns,
                line < lines,
                min(rows, num_rows - row),
                x + (row * num_columns + first) * BYTES,
                num_columns,
                weights,
                depth,
                start + row * start_stride * BYTES,
                start_stride,
                out + row * out_stride * BYTES,
                out_stride,
                behind + line * depth * CACHE_LINE,
            )


@part
def _last_panel(x, num_columns, panel, columns, bias, out, out_stride, num_rows, width):
    """As `_inner_panel`, for a panel of which only `width` columns are used."""
    edge = _edge()
    for row in range(0, num_rows, ROWS):
        rows = min(ROWS, num_rows - row)
        _tile(columns, False, rows, x + row * num_columns * BYTES, num_columns, panel, num_columns, bias, 0, edge, columns, 0)
        for i in range(rows):
            for column in range(width):
                put(out, (row + i) * out_stride + column, get(edge, i * columns + column))


@task
def _panels(a):
    x, panels, bias, out = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3)
    num_rows, num_columns, num_outputs, columns = argument(a, 4), argument(a, 5), argument(a, 6), argument(a, 7)
    first, end = share(a, (num_outputs + columns - 1) // columns)
    for index in range(first, end):
        panel = panels + index * num_columns * columns * BYTES
        place = index * columns * BYTES
        width = num_outputs - index * columns
        if width >= columns:
            _inner_panel(x, num_columns, panel, columns, bias + place, out + place, num_outputs, num_rows)
        else:
            _last_panel(x, num_columns, panel, columns, bias + place, out + place, num_outputs, num_rows, width)


@entry(11)
def _run(pool, threads, task, x, panels, bias, out, num_rows, num_columns, num_outputs, columns):
    run(pool, threads, task, (x, panels, bias, out, num_rows, num_columns, num_outputs, columns))


_multiply = Launch(_run, _panels, rows_at=4)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with a packed weight.

    weight: [out, in] float32, bias: [out] → a function [T, in] → [T, out]; it keeps no reference to `weight`.
    """
    num_outputs, num_columns = weight.shape
    columns = COLUMNS if num_outputs < OUTPUTS_WIDEST else COLUMNS_WIDEST
    num_panels = -(-num_outputs // columns)
    panels = on_large_pages(num_panels, num_columns, columns)
    whole = num_outputs // columns
    panels[:whole] = weight[: whole * columns].view(whole, columns, num_columns).transpose(1, 2)
    if whole < num_panels:
        panels[whole] = 0.0
        panels[whole, :, : num_outputs - whole * columns] = weight[whole * columns :].T
    padded = torch.zeros(num_panels * columns)
    if bias is not None:
        padded[:num_outputs] = bias
    panels_address, bias_address = panels.data_ptr(), padded.data_ptr()
    size = num_outputs * num_columns

    def linear(x: torch.Tensor, _kept: tuple[torch.Tensor, ...] = (panels, padded)) -> torch.Tensor:
        assert x.dtype is torch.float32
        x = x.contiguous()
        num_rows = x.shape[0]
        out = new(num_rows, num_outputs)
        places = x.data_ptr(), panels_address, bias_address, out.data_ptr()
        _multiply(num_rows * size, *places, num_rows, num_columns, num_outputs, columns)
        return out

    return linear
