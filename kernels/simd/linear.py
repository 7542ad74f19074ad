"""Matrix products with weights that are packed once into panels: x Wᵀ + b.

A panel holds as many of W's rows as a tile has columns, interleaved element by element, padded with zeros at the end of W: [in,
columns]. The threads divide the panels between them; each panel is read once from memory, in order, for all rows of x, tile by
tile from the cache. While tiles are computed, the next panel is prefetched. oneDNN, which torch would call, takes 1.05 to 3
times as long (ADR 28).

Moves |W| + |x| + |out| bytes for 2 · T · |W| operations; sums in float32, each in the order of its columns (see `tiles`), so
that a row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from llvmlite import binding

from kernels.simd.compiling import entry, subroutine, task
from kernels.simd.large_pages import on_large_pages
from kernels.simd.launching import Launch, empty
from kernels.simd.threads import argument, run, thread_range
from kernels.simd.tiles import (
    CACHE_LINE,
    ROWS,
    TILE_VECTORS,
    WIDE_TILE_VECTORS,
    multiply,
    multiply_prefetching,
    multiply_wide,
    multiply_wide_prefetching,
)
from kernels.simd.vectors import BYTES, LANES, load_float32, stack_buffer, store_float32

COLUMNS, WIDE_COLUMNS = TILE_VECTORS * LANES, WIDE_TILE_VECTORS * LANES
WIDE_OUTPUTS_MIN = 768
"""From this many outputs on, a panel has WIDE_COLUMNS; fewer panels of a smaller matrix would be divided unevenly."""

DEPTH = 1024
"""Columns of W that a panel's tiles process at a time: the weights read, and as many prefetched, stay in a core's cache."""

PREFETCH_ROWS_MIN = ROWS + 1 if binding.get_host_cpu_name().startswith("znver") else 3
"""Rows from which the next panel is prefetched. With fewer, the hardware prefetcher predicts the reads. On AMD's processors it
does so for all rows of a tile: requesting lines twice costs a tenth there. On Intel's, a tile of 3 to 8 rows gains a fifth."""

_partial_tile = stack_buffer(ROWS * WIDE_COLUMNS)


@subroutine
def _multiply_tile(
    columns, prefetches, rows, x, num_columns, weights, depth, start, start_stride, out, out_stride, prefetch_address
):
    """A tile of a panel with `columns` columns; if it `prefetches`, each step prefetches a line from `prefetch_address` on."""
    if columns == COLUMNS:
        if prefetches:
            multiply_prefetching(
                rows, x, num_columns, weights, columns, depth, start, start_stride, out, out_stride, prefetch_address
            )
        else:
            multiply(rows, x, num_columns, weights, columns, depth, start, start_stride, out, out_stride, 0)
    elif prefetches:
        multiply_wide_prefetching(
            rows, x, num_columns, weights, columns, depth, start, start_stride, out, out_stride, prefetch_address
        )
    else:
        multiply_wide(rows, x, num_columns, weights, columns, depth, start, start_stride, out, out_stride, 0)


@subroutine
def _multiply_full_panel(x, num_columns, panel, columns, bias, out, out_stride, num_rows):
    """out: the address of the panel's columns in the first row. Tiles have nearly equal numbers of rows. Each tile prefetches
    one of the lines of a step, the first tile the first line and so on: memory is accessed evenly while all tiles are computed,
    not in bursts between pauses."""
    lines = columns * BYTES // CACHE_LINE if num_rows >= PREFETCH_ROWS_MIN else 0
    num_tiles = (num_rows + ROWS - 1) // ROWS
    rows = (num_rows + num_tiles - 1) // num_tiles
    for first in range(0, num_columns, DEPTH):
        depth = min(DEPTH, num_columns - first)
        weights = panel + first * columns * BYTES
        next_weights = weights + depth * columns * BYTES
        start, start_stride = (out, out_stride) if first else (bias, 0)
        for row in range(0, num_rows, rows):
            line = row // rows
            _multiply_tile(
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
                next_weights + line * depth * CACHE_LINE,
            )


@subroutine
def _multiply_partial_panel(x, num_columns, panel, columns, bias, out, out_stride, num_rows, width):
    """As `_multiply_full_panel`, for a panel with only `width` columns in use."""
    partial = _partial_tile()
    for row in range(0, num_rows, ROWS):
        rows = min(ROWS, num_rows - row)
        _multiply_tile(
            columns, False, rows, x + row * num_columns * BYTES, num_columns, panel, num_columns, bias, 0, partial, columns, 0
        )
        for i in range(rows):
            for column in range(width):
                store_float32(out, (row + i) * out_stride + column, load_float32(partial, i * columns + column))


@task
def _multiply_panels(a):
    x, panels, bias, out = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3)
    num_rows, num_columns, num_outputs, columns = argument(a, 4), argument(a, 5), argument(a, 6), argument(a, 7)
    first, end = thread_range(a, (num_outputs + columns - 1) // columns)
    for index in range(first, end):
        panel = panels + index * num_columns * columns * BYTES
        offset = index * columns * BYTES
        width = num_outputs - index * columns
        if width >= columns:
            _multiply_full_panel(x, num_columns, panel, columns, bias + offset, out + offset, num_outputs, num_rows)
        else:
            _multiply_partial_panel(x, num_columns, panel, columns, bias + offset, out + offset, num_outputs, num_rows, width)


@entry(11)
def _run(pool, threads, task, x, panels, bias, out, num_rows, num_columns, num_outputs, columns):
    run(pool, threads, task, (x, panels, bias, out, num_rows, num_columns, num_outputs, columns))


_multiply = Launch(_run, _multiply_panels, num_rows_at=4)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with a packed weight.

    weight: [out, in] float32, bias: [out] → a function [T, in] → [T, out]; it keeps no reference to `weight`.
    """
    num_outputs, num_columns = weight.shape
    columns = COLUMNS if num_outputs < WIDE_OUTPUTS_MIN else WIDE_COLUMNS
    num_panels = -(-num_outputs // columns)
    panels = on_large_pages(num_panels, num_columns, columns)
    num_full = num_outputs // columns
    panels[:num_full] = weight[: num_full * columns].view(num_full, columns, num_columns).transpose(1, 2)
    if num_full < num_panels:
        panels[num_full] = 0.0
        panels[num_full, :, : num_outputs - num_full * columns] = weight[num_full * columns :].T
    padded_bias = torch.zeros(num_panels * columns)
    if bias is not None:
        padded_bias[:num_outputs] = bias
    panels_address, bias_address = panels.data_ptr(), padded_bias.data_ptr()
    row_work = num_outputs * num_columns

    def linear(x: torch.Tensor, _keepalive: tuple[torch.Tensor, ...] = (panels, padded_bias)) -> torch.Tensor:
        assert x.dtype is torch.float32
        x = x.contiguous()
        num_rows = x.shape[0]
        out = empty(num_rows, num_outputs)
        addresses = x.data_ptr(), panels_address, bias_address, out.data_ptr()
        _multiply(num_rows * row_work, *addresses, num_rows, num_columns, num_outputs, columns)
        return out

    return linear
