"""Products whose columns are divided among programs: partial sums in float32, added in a fixed order by the last program.

A matrix for few rows of x is read once and needs more programs than it has tiles, or most of the card is idle. Each program
stores its partial sums and counts itself; the last one of a tile adds all of them from the first to the last, so the result
does not depend on which was last: integers are counted atomically, floats never are.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SPLITS_MAX = 8
COUNTERS = 8192  # most tiles of one product
WAVE_BYTES = 32768  # of weights that a multiprocessor could have read (1 µs on an H200) while programs start and loads arrive
SPLIT_BYTES = 49152  # that it could have read while partial sums are stored, counted and added


@dataclass(frozen=True, slots=True)
class Pace:
    """How programs of one kind share a card: `resident` of them fit on a multiprocessor, and a lone one needs `alone` times as
    long for its steps as the memory needs to deliver a multiprocessor's share of them. Many loads in flight make `alone` less
    than one; much unpacking leaves gaps that other programs fill."""

    resident: int
    alone: float


STREAM = Pace(resident=2, alone=1.0)  # weights are multiplied as they are
CONVERT = Pace(resident=3, alone=1.5)  # bytes become floats
UNPACK = Pace(resident=3, alone=1.5)  # so do codes of four bits


@functools.cache
def split_count(
    tiles: int, steps: int, multiprocessors: int, step_bytes: int, *, pace: Pace = STREAM, splits_max: int = SPLITS_MAX
) -> int:
    """Into how many parts (1, 2, 4, …) the `steps` of each tile are divided, so that the card finishes first.

    Independent of the number of rows: a matrix is divided in the same way for any batch.
    """
    possible = [1]
    while tiles <= COUNTERS and possible[-1] < splits_max and steps >= 4 * possible[-1]:
        possible.append(2 * possible[-1])
    return min(possible, key=lambda splits: split_cost(tiles, steps, multiprocessors, step_bytes, splits, pace=pace))


def split_cost(tiles: int, steps: int, multiprocessors: int, step_bytes: int, splits: int, *, pace: Pace = STREAM) -> float:
    """The cost in bytes of weights that a multiprocessor could have read meanwhile, at its share of the memory's speed.

    Programs that run at a time wait for one memory, so a multiprocessor with fewer of them finishes neither sooner nor later.
    The cost comes from a further wave of programs, which begins with empty pipelines.
    """
    programs, own_bytes = tiles * splits, -(-steps // splits) * step_bytes
    waves, rest = divmod(programs, pace.resident * multiprocessors)
    cost = waves * max(pace.resident, pace.alone) * own_bytes
    if rest:
        cost += max(rest / multiprocessors, pace.alone) * own_bytes
    return cost + (waves + (rest > 0)) * WAVE_BYTES + (splits > 1) * SPLIT_BYTES


@functools.cache
def counters(device: torch.device) -> torch.Tensor:
    """[COUNTERS] int32 zeros, one set per device; every launch leaves zeros. One stream at a time may use it."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def partial_sums(tiles: int, splits: int, tile_size: int, device: torch.device) -> torch.Tensor | None:
    """Memory for the partial sums of one launch; None if nothing is divided. torch's allocator reuses it in stream order."""
    return torch.empty(tiles * splits * tile_size, dtype=torch.float32, device=device) if splits > 1 else None


@triton.jit
def store_product(
    product,
    out_ptr,
    bias_ptr,
    partials_ptr,
    counters_ptr,
    tile,
    split,
    rows,
    columns,
    M,
    N,
    stride_out,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """product: [BLOCK_M, BLOCK_N] float32 → out[rows, columns] + bias; with SPLITS > 1 the sum of all splits' products.

    `tile` numbers the tiles of the launch; rows ≥ M and columns ≥ N are neither read nor written.
    """
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    if SPLITS == 1:
        _store_rows(product, out_ptr, bias_ptr, rows, columns, mask, N, stride_out)
    else:
        inner = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        first = partials_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N)
        tl.store(first + split * (BLOCK_M * BLOCK_N) + inner, product, mask=mask)
        # All threads' partial sums are stored before one of them says so, and read by the last one after it knows.
        tl.debug_barrier()
        earlier = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if earlier == SPLITS - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            # As many loads under way as there are registers for.
            TOGETHER: tl.constexpr = 1 if BLOCK_M * BLOCK_N > 2048 else (4 if SPLITS > 4 else SPLITS)
            for begin in range(0, SPLITS, TOGETHER):
                for part in tl.static_range(TOGETHER):
                    place = first + (begin + part) * (BLOCK_M * BLOCK_N) + inner
                    total += tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
            _store_rows(total, out_ptr, bias_ptr, rows, columns, mask, N, stride_out)
            tl.store(counters_ptr + tile, 0)


@triton.jit
def _store_rows(values, out_ptr, bias_ptr, rows, columns, mask, N, stride_out):
    if bias_ptr is not None:
        values += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    places = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(places, values.to(out_ptr.dtype.element_ty), mask=mask)
