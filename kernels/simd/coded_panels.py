"""Panels of codes and the way through them: what the products with quantised weights have in common.

A panel holds the codes of PANEL outputs, column after column, zeros where W ends. The threads share the panels; each is read
once from memory, in order, for the first tile of rows, and from the cache for the others.

Moves |codes| + |x| + |out| bytes for 2 · T · |W| operations; sums in float32, each in the order of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from kernels.simd.coded_tiles import PANEL, Format, tiles_of
from kernels.simd.compiling import entry, part
from kernels.simd.large_pages import on_large_pages
from kernels.simd.launching import Launch, new
from kernels.simd.threads import argument, run, share
from kernels.simd.tiles import ROWS
from kernels.simd.vectors import BYTES


def way_through(form: Format) -> Callable[[int], None]:
    """The body of a format's task: the panels of one thread. Its arguments are those of `_multiply`."""
    tiles, column_bytes = tiles_of(form), form.column_bytes

    @part
    def panels(a):
        x, codes, groups, bias, out = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4)
        num_rows, num_columns, num_outputs, group_size = argument(a, 5), argument(a, 6), argument(a, 7), argument(a, 8)
        num_groups = (num_columns + group_size - 1) // group_size
        first, end = share(a, (num_outputs + PANEL - 1) // PANEL)
        for index in range(first, end):
            output = index * PANEL
            panel = codes + index * num_columns * column_bytes
            for row in range(0, num_rows, ROWS):
                tiles(
                    min(ROWS, num_rows - row),
                    x + row * num_columns * BYTES,
                    num_columns,
                    num_columns,
                    group_size,
                    panel,
                    panel + num_columns * column_bytes,
                    groups + output * num_groups * BYTES,
                    bias + output * BYTES,
                    out + (row * num_outputs + output) * BYTES,
                    num_outputs,
                    num_outputs - output,
                )

    function: Callable[[int], None] = panels
    return function


@entry(12)
def _run(pool, threads, task, x, codes, groups, bias, out, num_rows, num_columns, num_outputs, group_size):
    run(pool, threads, task, (x, codes, groups, bias, out, num_rows, num_columns, num_outputs, group_size))


def bind(
    task: Any,
    codes: torch.Tensor,
    groups: torch.Tensor,
    bias: torch.Tensor | None,
    num_columns: int,
    *,
    group_size: int | None = None,
) -> Callable[[torch.Tensor], torch.Tensor]:
    """→ a function [T, num_columns] → [T, N], like its input, which may be of any float type.

    codes: the panels as `task` reads them; groups: [N, groups] entries of 4 bytes, `group_size` None is one for all columns.
    """
    num_outputs = groups.shape[0]
    codes = on_large_pages(*codes.shape, dtype=codes.dtype).copy_(codes)
    entries = in_panels(groups).transpose(1, 2).contiguous()
    addends = torch.zeros(codes.shape[0] * PANEL)
    if bias is not None:
        addends[:num_outputs] = bias
    codes_address, entries_address, addends_address = codes.data_ptr(), entries.data_ptr(), addends.data_ptr()
    multiply, size, columns_of_group = Launch(_run, task, rows_at=5), num_outputs * num_columns, group_size or num_columns

    def linear(x: torch.Tensor, _kept: tuple[torch.Tensor, ...] = (codes, entries, addends)) -> torch.Tensor:
        rows = x.float().contiguous()
        num_rows = rows.shape[0]
        out = new(num_rows, num_outputs)
        multiply(
            num_rows * size,
            rows.data_ptr(),
            codes_address,
            entries_address,
            addends_address,
            out.data_ptr(),
            num_rows,
            num_columns,
            num_outputs,
            columns_of_group,
        )
        return out.to(x.dtype)

    return linear


def in_panels(rows: torch.Tensor) -> torch.Tensor:
    """rows: [N, K] → [panels, PANEL, K], zeros behind"""
    missing = -rows.shape[0] % PANEL
    return functional.pad(rows, (0, 0, 0, missing)).view(-1, PANEL, rows.shape[1])
