"""Panels of codes and the loops over them, shared by the products with quantised weights.

A panel holds the codes of PANEL outputs, column after column, padded with zeros at the end of W. The threads divide the panels;
each is read once from memory, in order. Tiles of few rows decode it in registers, each for itself. With many rows only the
first tile decodes, and keeps the decoded numbers, DEPTH columns of half a panel at a time, in the cache of its core; the other
tiles use them as float32 weights. A last panel that is not full is decoded by every tile.

Moves |codes| + |x| + |out| bytes for 2 · T · |W| operations; sums in float32, each in the order of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import torch
from torch.nn import functional

from kernels.simd.coded_tiles import PANEL, PANEL_VECTORS, Format, tiles_of
from kernels.simd.compiling import entry, part
from kernels.simd.large_pages import on_large_pages
from kernels.simd.launching import Launch, new
from kernels.simd.threads import argument, run, share
from kernels.simd.tiles import ROWS, WIDE, multiply
from kernels.simd.vectors import BYTES, LANES, fma, load, splat, stack, store, store_part

COLUMNS = WIDE * LANES
DEPTH = 2048
"""Columns of W decoded at a time."""

FEW_ROWS = ROWS // 2

_sums = stack(ROWS * PANEL)
_zeros = stack(PANEL)
_decoded = stack(DEPTH * COLUMNS)


@part
def _cleared(address):
    for index in range(0, PANEL, LANES):
        store(address, index, splat(numba.float32(0.0)))


@part
def _finish(sums, sums_stride, factors, bias, out, out_stride, num_rows, width):
    """out[r] = sums[r] · factors + bias for the first `width` outputs."""
    for row in range(num_rows):
        end = row * out_stride + width
        for index in range(0, width, LANES):
            total = fma(load(sums, row * sums_stride + index), load(factors, index), load(bias, index))
            store_part(out, row * out_stride + index, end, total)


def panels_of(form: Format) -> Callable[[int], None]:
    """The body of a format's task: one thread's panels. Its arguments are those of `_run`."""
    column_bytes, many_rows = form.column_bytes, form.many_rows
    few_rows, half_panel = _few_rows(form), _half_panel(form)

    @part
    def panels(a):
        x, codes, groups, factors, bias, out = (
            argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4), argument(a, 5)
        )  # fmt: skip
        num_rows, num_columns, num_outputs, group_size = argument(a, 6), argument(a, 7), argument(a, 8), argument(a, 9)
        num_groups = (num_columns + group_size - 1) // group_size
        zeros, sums = _zeros(), _sums()
        _cleared(zeros)
        first, end = share(a, (num_outputs + PANEL - 1) // PANEL)
        for index in range(first, end):
            place = index * PANEL * BYTES
            width = min(PANEL, num_outputs - index * PANEL)
            panel = codes + index * num_columns * column_bytes
            entries = groups + place * num_groups
            if num_rows >= many_rows and width == PANEL:
                for half in range(2):
                    at, half_codes = half * COLUMNS * BYTES, panel + half * (column_bytes // 2)
                    half_panel(
                        num_rows, x, num_columns, half_codes, entries + at, group_size,
                        panel + num_columns * (column_bytes + half * (column_bytes // 2)), zeros, out + place + at, num_outputs,
                    )  # fmt: skip
                _finish(out + place, num_outputs, factors + place, bias + place, out + place, num_outputs, num_rows, width)
            else:
                for row in range(0, num_rows, ROWS):
                    rows = min(ROWS, num_rows - row)
                    few_rows(rows, x + row * num_columns * BYTES, num_columns, panel, entries, group_size, zeros, sums)
                    written = out + place + row * num_outputs * BYTES
                    _finish(sums, PANEL, factors + place, bias + place, written, num_outputs, rows, width)

    function: Callable[[int], None] = panels
    return function


def _few_rows(form: Format) -> Callable[..., None]:
    """1 to ROWS rows of a panel, decoded in registers."""
    column_bytes, half_bytes = form.column_bytes, form.column_bytes // 2
    few = tiles_of(form, PANEL_VECTORS, FEW_ROWS)
    more = tiles_of(form, WIDE, ROWS, fewest_rows=FEW_ROWS + 1)

    @part
    def few_rows(rows, x, num_columns, codes, groups, group_size, zeros, sums):
        """sums[r] = Σ_k x[r, k] · decoded(codes[k]); the next panel is fetched meanwhile."""
        ahead = codes + num_columns * column_bytes
        if rows <= FEW_ROWS:
            few(rows, x, num_columns, codes, 0, num_columns, groups, group_size, zeros, 0, sums, PANEL, ahead, 0)
            return
        for half in range(2):
            place = half * COLUMNS * BYTES
            more(
                rows, x, num_columns, codes + half * half_bytes, 0, num_columns, groups + place, group_size,
                zeros, 0, sums + place, PANEL, ahead + half * num_columns * half_bytes, 0,
            )  # fmt: skip

    function: Callable[..., None] = few_rows
    return function


def _half_panel(form: Format) -> Callable[..., None]:
    """More than ROWS rows of half a panel, decoded for all of them by the first tile into the cache of the core."""
    keeping = tiles_of(form, WIDE, ROWS, fewest_rows=ROWS, keeps=True)

    @part
    def half_panel(num_rows, x, num_columns, codes, groups, group_size, ahead, zeros, out, out_stride):
        """out[r] = Σ_k x[r, k] · decoded(codes[k]); as much is fetched from `ahead` meanwhile."""
        decoded = _decoded()
        for first in range(0, num_columns, DEPTH):
            end = min(first + DEPTH, num_columns)
            start, start_stride = (out, out_stride) if first else (zeros, 0)
            kept = decoded - first * COLUMNS * BYTES
            keeping(
                ROWS, x, num_columns, codes, first, end, groups, group_size, start, start_stride, out, out_stride, ahead, kept
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


def bind(
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

    codes: the panels as `task` reads them; factors: [N], for the sums; groups: [N, groups] entries of 4 bytes, one for every
    `group_size` columns, if the format has groups.
    """
    num_outputs = factors.shape[0]
    codes = on_large_pages(*codes.shape, dtype=codes.dtype).copy_(codes)
    entries = torch.empty(0) if groups is None else in_panels(groups).transpose(1, 2).contiguous()
    of_outputs = torch.zeros(2, codes.shape[0] * PANEL)
    of_outputs[0, :num_outputs] = factors
    if bias is not None:
        of_outputs[1, :num_outputs] = bias
    addresses = [each.data_ptr() for each in (codes, entries, *of_outputs)]
    multiply, size, columns_of_group = Launch(_run, task, rows_at=6), num_outputs * num_columns, group_size or num_columns

    def linear(x: torch.Tensor, _kept: tuple[torch.Tensor, ...] = (codes, entries, of_outputs)) -> torch.Tensor:
        rows = x.float().contiguous()
        num_rows = rows.shape[0]
        out = new(num_rows, num_outputs)
        multiply(
            num_rows * size,
            rows.data_ptr(),
            *addresses,
            out.data_ptr(),
            num_rows,
            num_columns,
            num_outputs,
            columns_of_group,
        )
        return out.to(x.dtype)

    return linear


def in_panels(rows: torch.Tensor) -> torch.Tensor:
    """rows: [N, K] → [panels, PANEL, K], padded with zeros"""
    missing = -rows.shape[0] % PANEL
    return functional.pad(rows, (0, 0, 0, missing)).view(-1, PANEL, rows.shape[1])
