"""Inputs of a decode step from the state of its slots, and their state after the step; see `kernels.torch.decode_inputs`.

Copies a few integers per row and the blocks that its context reaches.
"""

from __future__ import annotations

import torch

from kernels.host_tokens import HostTokens
from kernels.simd.compiling import entry, task
from kernels.simd.launching import Launch
from kernels.simd.threads import argument, run, thread_range
from kernels.simd.vectors import load_int32, load_int64, store_int32, store_int64


@task
def _prepare_rows(a):
    slots, last_tokens, num_tokens, tables, width, block_size = (
        argument(a, 0), argument(a, 1), argument(a, 2), argument(a, 3), argument(a, 4), argument(a, 5),
    )  # fmt: skip
    token_ids, positions, slot_mapping, context_lens, block_tables, out_width = (
        argument(a, 6), argument(a, 7), argument(a, 8), argument(a, 9), argument(a, 10), argument(a, 11),
    )  # fmt: skip
    first, end = thread_range(a, argument(a, 12))
    for row in range(first, end):
        slot = load_int32(slots, row)
        context = load_int32(num_tokens, slot) if slot >= 0 else 0
        last = max(context - 1, 0)
        cache_slot, column = -1, last // block_size
        if context > 0 and column < width:
            cache_slot = load_int32(tables, slot * width + column) * block_size + last % block_size
        store_int64(token_ids, row, load_int64(last_tokens, slot) if slot >= 0 else 0)
        store_int64(positions, row, last)
        store_int64(slot_mapping, row, cache_slot)
        store_int32(context_lens, row, context)
        for index in range(min(width, (context + block_size - 1) // block_size)):
            store_int32(block_tables, row * out_width + index, load_int32(tables, slot * width + index))


@entry(16)
def _run_rows(
    pool, threads, task, slots, last_tokens, num_tokens, tables, width, block_size,
    token_ids, positions, slot_mapping, context_lens, block_tables, out_width, num_rows,
):  # fmt: skip
    run(
        pool, threads, task,
        (slots, last_tokens, num_tokens, tables, width, block_size,
         token_ids, positions, slot_mapping, context_lens, block_tables, out_width, num_rows),
    )  # fmt: skip


@task
def _advance_rows(a):
    slots, sampled, last_tokens = argument(a, 0), argument(a, 1), argument(a, 2)
    num_tokens, out = argument(a, 3), argument(a, 4)
    first, end = thread_range(a, argument(a, 5))
    for row in range(first, end):
        slot, token = load_int32(slots, row), load_int64(sampled, row)
        if slot >= 0:
            store_int64(last_tokens, slot, max(token, 0))
            store_int32(num_tokens, slot, load_int32(num_tokens, slot) + 1)
        if out:
            store_int64(out, row, token)


@entry(9)
def _run_advance(pool, threads, task, slots, sampled, last_tokens, num_tokens, out, num_rows):
    run(pool, threads, task, (slots, sampled, last_tokens, num_tokens, out, num_rows))


_prepare = Launch(_run_rows, _prepare_rows, num_rows_at=12)
_advance = Launch(_run_advance, _advance_rows, num_rows_at=5)


def prepare_decode(
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    slot_tables: torch.Tensor,
    *,
    block_size: int,
    token_ids: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """As `kernels.torch.decode_inputs.prepare_decode`: slots and num_tokens int32, last_tokens int64, slot_tables [S, M] int32;
    token_ids, positions and slot_mapping [B] int64, context_lens [B] and block_tables [B, M] int32."""
    assert slots.dtype is num_tokens.dtype is slot_tables.dtype is torch.int32
    assert last_tokens.dtype is torch.int64
    _prepare(
        slots.numel() * slot_tables.shape[1],
        slots.data_ptr(),
        last_tokens.data_ptr(),
        num_tokens.data_ptr(),
        slot_tables.data_ptr(),
        slot_tables.shape[1],
        block_size,
        token_ids.data_ptr(),
        positions.data_ptr(),
        slot_mapping.data_ptr(),
        context_lens.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        slots.shape[0],
    )


def advance_slots(
    slots: torch.Tensor,
    sampled: torch.Tensor,
    last_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    host: HostTokens | None = None,
) -> None:
    """As `kernels.torch.decode_inputs.advance_slots`: slots and num_tokens int32, sampled, last_tokens and out int64."""
    assert host is None, "this device is the host"
    assert slots.dtype is num_tokens.dtype is torch.int32
    assert sampled.dtype is last_tokens.dtype is torch.int64
    _advance(
        slots.numel(),
        slots.data_ptr(),
        sampled.data_ptr(),
        last_tokens.data_ptr(),
        num_tokens.data_ptr(),
        0 if out is None else out.data_ptr(),
        slots.shape[0],
    )
