"""Look-up of rows: of the embedding by token, of cosines and sines by position."""

from __future__ import annotations

import torch

from kernels.simd.compiling import entry, task
from kernels.simd.launching import Launch, empty
from kernels.simd.threads import argument, float_argument, run, thread_range
from kernels.simd.vectors import BYTES, LANES, load_int64, masked_load, masked_store, splat


@task
def _copy_rows(a):
    table, index, out, size, factor = argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 4), float_argument(a, 5)
    first, end = thread_range(a, argument(a, 3))
    for row in range(first, end):
        source, target = table + load_int64(index, row) * size * BYTES, out + row * size * BYTES
        for i in range(0, size, LANES):
            masked_store(target, i, size, masked_load(source, i, size) * splat(factor))


@entry(8, 1)
def _run(pool, threads, task, table, index, out, num_rows, size, factor):
    run(pool, threads, task, (table, index, out, num_rows, size, factor))


_look_up = Launch(_run, _copy_rows, num_rows_at=3, num_floats=1)


def _rows_of(table: torch.Tensor, index: torch.Tensor, factor: float) -> torch.Tensor:
    """table: [N, …] float32 → [T, …]; every index must be within the table."""
    index = index.contiguous() if index.dtype is torch.int64 else index.long()
    out = empty(index.shape[0], *table.shape[1:])
    size = table[0].numel()
    _look_up(out.numel(), table.data_ptr(), index.data_ptr(), out.data_ptr(), index.shape[0], size, factor)
    return out


def embed(token_ids: torch.Tensor, table: torch.Tensor, *, multiplier: float = 1.0) -> torch.Tensor:
    """Rows of the embedding. token_ids: [T] int64 or int32, table: [V, hidden] float32 → [T, hidden] · multiplier"""
    return _rows_of(table, token_ids, multiplier)


def rotation_rows(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines by position.

    cos, sin: [max_len, 1, rotary_dim] float32, positions: [T] → both at these positions, [T, 1, rotary_dim]
    """
    return _rows_of(cos, positions, 1.0), _rows_of(sin, positions, 1.0)
