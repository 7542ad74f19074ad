"""Panels of codes and the loops over them, shared by the products with quantised weights.

A panel holds the codes of PANEL outputs, column after column, padded with zeros at the end of W. The threads divide the panels
between them; each is read once from memory, in order. With few rows every tile decodes it in registers. With many rows only the
first tile decodes it, and stores the decoded weights, DEPTH columns of half a panel at a time, in the cache of its core; the
other tiles use them as float32 weights. A last panel that is not full is decoded by every tile.

Moves |codes| + |x| + |out| bytes for 2 · T · |W| operations; sums in float32, each in the order of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kernels.simd.compiling import entry, subroutine
from kernels.simd.large_pages import on_large_pages
from kernels.simd.launching import Launch, empty
from kernels.simd.quantised_tiles import PANEL, PANEL_VECTORS, Format, make_tile
from kernels.simd.threads import argument, run, thread_range
from kernels.simd.tiles import ROWS, TILE_VECTORS, multiply
from kernels.simd.vectors import BYTES, LANES, clear, fma, load, masked_store, stack_buffer

COLUMNS = TILE_VECTORS * LANES
DEPTH = 2048
"""Columns of W decoded at a time."""

FEW_ROWS = ROWS // 2

_sums = stack_buffer(ROWS * PANEL)
_zeros = stack_buffer(PANEL)
_decoded = stack_buffer(DEPTH * COLUMNS)


@subroutine
def _store_scaled(sums, sums_stride, factors, bias, out, out_stride, num_rows, width):
    """out[r] = sums[r] · factors + bias for the first `width` outputs."""
    for row in range(num_rows):
        end = row * out_stride + width
        for index in range(0, width, LANES):
            total = fma(load(sums, row * sums_stride + index), load(factors, index), load(bias, index))
            masked_store(out, row * out_stride + index, end, total)


def make_task_body(weight_format: Format) -> Callable[[int], None]:
    """The body of a format's task: one thread's panels. Its arguments are those of `_run`."""
    column_bytes, shared_decode_rows_min = weight_format.column_bytes, weight_format.shared_decode_rows_min
    few_rows, half_panel = _make_few_rows(weight_format), _make_half_panel(weight_format)

    @subroutine
    def multiply_panels(a):
        x, codes, groups, factors, bias, out = (
            argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4), argument(a, 5)
        )  # fmt: skip
        num_rows, num_columns, num_outputs, group_size = argument(a, 6), argument(a, 7), argument(a, 8), argument(a, 9)
        num_groups = (num_columns + group_size - 1) // group_size
        zeros, sums = _zeros(), _sums()
        clear(zeros, PANEL)
        first, end = thread_range(a, (num_outputs + PANEL - 1) // PANEL)
        for index in range(first, end):
            offset = index * PANEL * BYTES
            width = min(PANEL, num_outputs - index * PANEL)
            panel = codes + index * num_columns * column_bytes
            entries = groups + offset * num_groups
            if num_rows >= shared_decode_rows_min and width == PANEL:
                for half in range(2):
                    half_offset, half_codes = half * COLUMNS * BYTES, panel + half * (column_bytes // 2)
                    half_panel(
                        num_rows, x, num_columns, half_codes, entries + half_offset, group_size,
                        panel + num_columns * (column_bytes + half * (column_bytes // 2)), zeros,
                        out + offset + half_offset, num_outputs,
                    )  # fmt: skip
                _store_scaled(
                    out + offset, num_outputs, factors + offset, bias + offset, out + offset, num_outputs, num_rows, width
                )
            else:
                for row in range(0, num_rows, ROWS):
                    rows = min(ROWS, num_rows - row)
                    few_rows(rows, x + row * num_columns * BYTES, num_columns, panel, entries, group_size, zeros, sums)
                    target = out + offset + row * num_outputs * BYTES
                    _store_scaled(sums, PANEL, factors + offset, bias + offset, target, num_outputs, rows, width)

    function: Callable[[int], None] = multiply_panels
    return function


def _make_few_rows(weight_format: Format) -> Callable[..., None]:
    """1 to ROWS rows of a panel, decoded in registers."""
    column_bytes, half_bytes = weight_format.column_bytes, weight_format.column_bytes // 2
    full_width_tile = make_tile(weight_format, PANEL_VECTORS, FEW_ROWS)
    half_width_tile = make_tile(weight_format, TILE_VECTORS, ROWS, min_rows=FEW_ROWS + 1)

    @subroutine
    def few_rows(rows, x, num_columns, codes, groups, group_size, zeros, sums):
        """sums[r] = Σ_k x[r, k] · decoded(codes[k]); the next panel is prefetched meanwhile."""
        next_codes = codes + num_columns * column_bytes
        if rows <= FEW_ROWS:
            full_width_tile(
                rows, x, num_columns, codes, 0, num_columns, groups, group_size, zeros, 0, sums, PANEL, next_codes, 0
            )
            return
        for half in range(2):
            offset = half * COLUMNS * BYTES
            half_width_tile(
                rows, x, num_columns, codes + half * half_bytes, 0, num_columns, groups + offset, group_size,
                zeros, 0, sums + offset, PANEL, next_codes + half * num_columns * half_bytes, 0,
            )  # fmt: skip

    function: Callable[..., None] = few_rows
    return function


def _make_half_panel(weight_format: Format) -> Callable[..., None]:
    """More than ROWS rows of half a panel, decoded for all of them by the first tile into the cache of the core."""
    decoding_tile = make_tile(weight_format, TILE_VECTORS, ROWS, min_rows=ROWS, stores_decoded=True)

    @subroutine
    def half_panel(num_rows, x, num_columns, codes, groups, group_size, next_codes, zeros, out, out_stride):
        """out[r] = Σ_k x[r, k] · decoded(codes[k]); as much is prefetched from `next_codes` meanwhile."""
        decoded = _decoded()
        for first in range(0, num_columns, DEPTH):
            end = min(first + DEPTH, num_columns)
            start, start_stride = (out, out_stride) if first else (zeros, 0)
            decoded_base = decoded - first * COLUMNS * BYTES
            decoding_tile(
                ROWS, x, num_columns, codes, first, end, groups, group_size, start, start_stride, out, out_stride,
                next_codes, decoded_base,
            )  # fmt: skip
            for row in range(ROWS, num_rows, ROWS):
                multiply(
                    min(ROWS, num_rows - row), x + (row * num_columns + first) * BYTES, num_columns, decoded, COLUMNS,
                    end - first, start + row * start_stride * BYTES, start_stride,
                    out + row * out_stride * BYTES, out_stride, 0,
                )  # fmt: skip

    function: Callable[..., None] = half_panel
    return function


@entry(13)
def _run(pool, threads, task, x, codes, groups, factors, bias, out, num_rows, num_columns, num_outputs, group_size):
    run(pool, threads, task, (x, codes, groups, factors, bias, out, num_rows, num_columns, num_outputs, group_size))


def bind_panels(
    task: Any,
    codes: torch.Tensor,
    factors: torch.Tensor,
    bias: torch.Tensor | None,
    num_columns: int,
    *,
    groups: torch.Tensor | None = None,
    group_size: int | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The product with the panels of a weight: a function [T, num_columns] → [T, N], like its input, of any float type.

    codes: the panels as `task` reads them; factors: [N], multiply the sums; groups: [N, groups] entries of 4 bytes, one for
    every `group_size` columns, if the format has groups.
    """
    num_outputs = factors.shape[0]
    codes = on_large_pages(*codes.shape, dtype=codes.dtype).copy_(codes)
    entries = torch.empty(0) if groups is None else split_into_panels(groups).transpose(1, 2).contiguous()
    factors_and_bias = torch.zeros(2, codes.shape[0] * PANEL)
    factors_and_bias[0, :num_outputs] = factors
    if bias is not None:
        factors_and_bias[1, :num_outputs] = bias
    addresses = [each.data_ptr() for each in (codes, entries, *factors_and_bias)]
    multiply, row_work, group_columns = Launch(_run, task, num_rows_at=6), num_outputs * num_columns, group_size or num_columns

    def linear(x: torch.Tensor, _keepalive: tuple[torch.Tensor, ...] = (codes, entries, factors_and_bias)) -> torch.Tensor:
        rows = x.float().contiguous()
        num_rows = rows.shape[0]
        out = empty(num_rows, num_outputs)
        multiply(
            num_rows * row_work,
            rows.data_ptr(),
            *addresses,
            out.data_ptr(),
            num_rows,
            num_columns,
            num_outputs,
            group_columns,
        )
        return out.to(x.dtype)

    return linear


def split_into_panels(rows: torch.Tensor) -> torch.Tensor:
    """rows: [N, K] → [panels, PANEL, K], padded with zeros"""
    padding = -rows.shape[0] % PANEL
    return functional.pad(rows, (0, 0, 0, padding)).view(-1, PANEL, rows.shape[1])
