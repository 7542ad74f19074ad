"""Deterministic split-K: columns are split among programs, and a tile's last program adds the float32 partial sums in order.

For few rows of x a matrix is read once and needs more programs than it has tiles, or most of the card is idle. Each program
stores its partial sums and increments its tile's arrival counter; the last to arrive adds all of them from the first to the
last, so the result does not depend on which was last: only integers are added atomically, never floats.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

SPLITS_MAX = 8
NUM_COUNTERS = 8192  # the most tiles of a product that is split
WAVE_BYTES = 32768  # bytes of weights a multiprocessor could read (1 µs on an H200) while programs start and first loads arrive
SPLIT_BYTES = 49152  # bytes it could read while partial sums are stored, counted and added


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How programs of one kind share a multiprocessor: `resident_programs` fit at a time, and a lone one takes `lone_step_time`
    times as long per step as reading the step's bytes at the multiprocessor's share of the memory bandwidth. Many loads in
    flight make `lone_step_time` less than one; unpacking leaves gaps that other programs fill."""

    resident_programs: int
    lone_step_time: float


STREAM = Occupancy(resident_programs=2, lone_step_time=1.0)  # weights are multiplied as they are
CONVERT = Occupancy(resident_programs=3, lone_step_time=1.5)  # codes of 8 or 4 bits are converted to floats


@functools.cache
def choose_splits(
    tiles: int,
    steps: int,
    multiprocessors: int,
    step_bytes: int,
    *,
    occupancy: Occupancy = STREAM,
    splits_max: int = SPLITS_MAX,
) -> int:
    """The number of splits (1, 2, 4, …) of each tile's `steps` with the lowest `split_cost`.

    Independent of the number of rows: a matrix is split in the same way for any batch.
    """
    candidates = [1]
    while tiles <= NUM_COUNTERS and candidates[-1] < splits_max and steps >= 4 * candidates[-1]:
        candidates.append(2 * candidates[-1])
    return min(
        candidates, key=lambda splits: split_cost(tiles, steps, multiprocessors, step_bytes, splits, occupancy=occupancy)
    )


def split_cost(
    tiles: int, steps: int, multiprocessors: int, step_bytes: int, splits: int, *, occupancy: Occupancy = STREAM
) -> float:
    """The time of a product, in bytes of weights that a multiprocessor could read in it at its share of the memory bandwidth.

    Programs that run at a time share that bandwidth, so a multiprocessor with fewer of them finishes neither sooner nor later.
    What costs is another wave of programs, which starts with empty pipelines.
    """
    programs, program_bytes = tiles * splits, -(-steps // splits) * step_bytes
    waves, remainder = divmod(programs, occupancy.resident_programs * multiprocessors)
    cost = waves * max(occupancy.resident_programs, occupancy.lone_step_time) * program_bytes
    if remainder:
        cost += max(remainder / multiprocessors, occupancy.lone_step_time) * program_bytes
    return cost + (waves + (remainder > 0)) * WAVE_BYTES + (splits > 1) * SPLIT_BYTES


@functools.cache
def arrival_counters(device: torch.device) -> torch.Tensor:
    """[NUM_COUNTERS] int32 zeros, one tensor per device; every launch leaves zeros. Only one stream at a time may use it."""
    return torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)


def split_workspace(
    tiles: int, splits: int, tile_size: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Memory for the partial sums of one launch, and its arrival counters; None without splits."""
    return (allocate_partials(tiles * splits * tile_size, device), arrival_counters(device)) if splits > 1 else (None, None)


def allocate_partials(size: int, device: torch.device) -> torch.Tensor:
    """[size] float32, not initialised; torch's allocator reuses it in stream order."""
    return torch.empty(size, dtype=torch.float32, device=device)


@triton.jit
def reduce_and_store(
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
    """Stores product: [BLOCK_M, BLOCK_N] float32, plus bias, in out[rows, columns]; with SPLITS > 1 the sum of all splits.

    `tile` numbers the tiles of the launch; rows ≥ M and columns ≥ N are neither read nor written.
    """
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    if SPLITS == 1:
        _store_tile(product, out_ptr, bias_ptr, rows, columns, mask, N, stride_out)
    else:
        offsets = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tile_partials = partials_ptr + tile.to(tl.int64) * (SPLITS * BLOCK_M * BLOCK_N)
        tl.store(tile_partials + split * (BLOCK_M * BLOCK_N) + offsets, product, mask=mask)
        # The barrier orders the stores of all threads before the increment; acq_rel orders the last program's loads after it.
        tl.debug_barrier()
        num_arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
        if num_arrived == SPLITS - 1:
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            # As many loads in flight as registers allow.
            LOADS_IN_FLIGHT: tl.constexpr = 1 if BLOCK_M * BLOCK_N > 2048 else (4 if SPLITS > 4 else SPLITS)
            for begin in range(0, SPLITS, LOADS_IN_FLIGHT):
                for index in tl.static_range(LOADS_IN_FLIGHT):
                    ptrs = tile_partials + (begin + index) * (BLOCK_M * BLOCK_N) + offsets
                    acc += tl.load(ptrs, mask=mask, other=0.0, cache_modifier=".cg")
            _store_tile(acc, out_ptr, bias_ptr, rows, columns, mask, N, stride_out)
            tl.store(counters_ptr + tile, 0)


@triton.jit
def _store_tile(values, out_ptr, bias_ptr, rows, columns, mask, N, stride_out):
    if bias_ptr is not None:
        values += tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out + columns[None, :]
    tl.store(out_ptrs, values.to(out_ptr.dtype.element_ty), mask=mask)
