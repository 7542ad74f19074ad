"""Matrix products with weights that are packed once into panels: x Wᵀ + b.

A panel holds as many of W's rows as a tile has columns, one number of each after the other, zeros where W ends: [in, columns].
The threads share the panels; each panel is read once from memory, in order, for all rows of x, tile by tile from the cache.
While a tile is computed the next panel is fetched. oneDNN, which torch would call, takes 1.05 to 3 times as long (ADR 28).

Moves |W| + |x| + |out| bytes for 2 · T · |W| operations; sums in float32, each in the order of its columns (see `tiles`), so
that a row has the same bits in any batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.simd.compiling import entry, part, task
from kernels.simd.large_pages import on_large_pages
from kernels.simd.launching import Launch, new
from kernels.simd.threads import argument, run, share
from kernels.simd.tiles import ROWS, WIDE, multiply, multiply_fetching, multiply_fetching_half
from kernels.simd.vectors import BYTES, LANES, get, put, stack

COLUMNS = WIDE * LANES
DEPTH = 2048
"""Columns of W that a panel's tiles pass at a time: what they read stays in the cache of a core."""

_edge = stack(ROWS * COLUMNS)


@part
def _inner_panel(x, num_columns, panel, bias, out, out_stride, num_rows):
    """out: the first row's place in the panel's columns."""
    for first in range(0, num_columns, DEPTH):
        depth = min(DEPTH, num_columns - first)
        weights = panel + first * COLUMNS * BYTES
        start, start_stride = (out, out_stride) if first else (bias, 0)
        begin = 0
        behind = weights + depth * COLUMNS * BYTES
        if num_rows >= 2 * ROWS:  # the memory is asked while both are computed, not in bursts between pauses
            for half in range(2):
                row = half * ROWS
                multiply_fetching_half(
                    ROWS,
                    x + (row * num_columns + first) * BYTES,
                    num_columns,
                    weights,
                    COLUMNS,
                    depth,
                    start + row * start_stride * BYTES,
                    start_stride,
                    out + row * out_stride * BYTES,
                    out_stride,
                    behind + half * depth * COLUMNS * BYTES // 2,
                )
            begin = 2 * ROWS
        elif num_rows > ROWS:
            multiply_fetching(
                ROWS, x + first * BYTES, num_columns, weights, COLUMNS, depth, start, start_stride, out, out_stride, behind
            )
            begin = ROWS
        for row in range(begin, num_rows, ROWS):
            multiply(
                min(ROWS, num_rows - row),
                x + (row * num_columns + first) * BYTES,
                num_columns,
                weights,
                COLUMNS,
                depth,
                start + row * start_stride * BYTES,
                start_stride,
                out + row * out_stride * BYTES,
                out_stride,
                0,
            )


@part
def _last_panel(x, num_columns, panel, bias, out, out_stride, num_rows, width):
    """As `_inner_panel`, for a panel of which only `width` columns are wanted."""
    edge = _edge()
    for row in range(0, num_rows, ROWS):
        rows = min(ROWS, num_rows - row)
        multiply(rows, x + row * num_columns * BYTES, num_columns, panel, COLUMNS, num_columns, bias, 0, edge, COLUMNS, 0)
        for i in range(rows):
            for column in range(width):
                put(out, (row + i) * out_stride + column, get(edge, i * COLUMNS + column))


@task
def _panels(a):
    x, panels, bias, out = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3)
    num_rows, num_columns, num_outputs = argument(a, 4), argument(a, 5), argument(a, 6)
    first, end = share(a, (num_outputs + COLUMNS - 1) // COLUMNS)
    for index in range(first, end):
        panel = panels + index * num_columns * COLUMNS * BYTES
        place = index * COLUMNS * BYTES
        width = num_outputs - index * COLUMNS
        if width >= COLUMNS:
            _inner_panel(x, num_columns, panel, bias + place, out + place, num_outputs, num_rows)
        else:
            _last_panel(x, num_columns, panel, bias + place, out + place, num_outputs, num_rows, width)


@entry(10)
def _run(pool, threads, task, x, panels, bias, out, num_rows, num_columns, num_outputs):
    run(pool, threads, task, (x, panels, bias, out, num_rows, num_columns, num_outputs))


_multiply = Launch(_run, _panels, rows_at=4)


def pack_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with a packed weight.

    weight: [out, in] float32, bias: [out] → a function [T, in] → [T, out]; it keeps no reference to `weight`.
    """
    num_outputs, num_columns = weight.shape
    num_panels = -(-num_outputs // COLUMNS)
    panels = on_large_pages(num_panels, num_columns, COLUMNS)
    whole = num_outputs // COLUMNS
    panels[:whole] = weight[: whole * COLUMNS].view(whole, COLUMNS, num_columns).transpose(1, 2)
    if whole < num_panels:
        panels[whole] = 0.0
        panels[whole, :, : num_outputs - whole * COLUMNS] = weight[whole * COLUMNS :].T
    padded = torch.zeros(num_panels * COLUMNS)
    if bias is not None:
        padded[:num_outputs] = bias
    panels_address, bias_address = panels.data_ptr(), padded.data_ptr()
    size = num_outputs * num_columns

    def linear(x: torch.Tensor, _kept: tuple[torch.Tensor, ...] = (panels, padded)) -> torch.Tensor:
        assert x.dtype is torch.float32
        x = x.contiguous()
        num_rows = x.shape[0]
        out = new(num_rows, num_outputs)
        _multiply(
            num_rows * size, x.data_ptr(), panels_address, bias_address, out.data_ptr(), num_rows, num_columns, num_outputs
        )
        return out

    return linear
