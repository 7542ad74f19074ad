"""Prepares the inputs of a decode step on the GPU from the state of its slots, and advances that state after the step.

The host decides which slots take part and provides their block tables; it launches the next step before it sees any token.

    state of a slot ── prepare_decode ──► inputs of a row ── forward, sample ──► token ── advance_slots ──► state of a slot
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.host_tokens import HostTokens
from kernels.triton.launching.early_launch import early_launch, wait_for_previous

COLUMNS = 512
"""Entries of a block table per program: 8,192 tokens at 16 per block."""
ROWS = 256
"""Rows of a step of the single program that advances the slots."""


@triton.jit
def prepare_decode_kernel(
    slots, last_tokens, num_tokens, slot_tables, token_ids, positions, slot_mapping, context_lens, block_tables,
    columns, slot_stride, row_stride, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    slot = tl.load(slots + row).to(tl.int64)
    is_active = slot >= 0
    length = tl.load(num_tokens + slot, mask=is_active, other=0).to(tl.int32)
    table = slot_tables + slot * slot_stride
    if tl.program_id(1) == 0:
        position = tl.maximum(length - 1, 0)
        in_table = is_active & (length > 0) & (position // BLOCK_SIZE < columns)
        block = tl.load(table + position // BLOCK_SIZE, mask=in_table, other=0).to(tl.int64)
        cache_slot = tl.where(in_table, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(token_ids + row, tl.load(last_tokens + slot, mask=is_active, other=0))
        tl.store(positions + row, position)
        tl.store(slot_mapping + row, cache_slot)
        tl.store(context_lens + row, length)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_used = (column < columns) & (column * BLOCK_SIZE < length)
    tl.store(block_tables + row.to(tl.int64) * row_stride + column, tl.load(table + column, mask=is_used), mask=is_used)


@triton.jit(do_not_specialize=["num_rows", "place_size"])
def advance_slots_kernel(
    slots, sampled, last_tokens, num_tokens, out, places, num_steps, num_rows, place_size,
    DEPTH: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    if places is not None:
        writes_for_host = tl.load(slots) >= 0
        number = tl.load(num_steps) + 1
        entry = places + number % DEPTH * place_size
    for first in range(0, num_rows, ROWS):
        row = first + tl.arange(0, ROWS)
        slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
        token = tl.load(sampled + row, mask=row < num_rows, other=0)
        is_active = slot >= 0
        if out is not None:
            tl.store(out + row, token, mask=row < num_rows)
        if places is not None:
            tl.store(entry + 1 + row, token, mask=(row < num_rows) & writes_for_host)
        tl.store(last_tokens + slot, tl.maximum(token, 0), mask=is_active)
        tl.store(num_tokens + slot, tl.load(num_tokens + slot, mask=is_active, other=0) + 1, mask=is_active)
    if places is not None:
        tl.store(entry, number, mask=writes_for_host)
        tl.debug_barrier()  # all threads have read num_steps
        tl.store(num_steps, number, mask=writes_for_host)


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
    """For row i with slot s = slots[i], whose last token is not yet in the cache, n = num_tokens[s] and p = n - 1:
    token_ids[i] = last_tokens[s], positions[i] = p, context_lens[i] = n, slot_mapping[i] = table[p // P] · P + p % P,
    block_tables[i, :⌈n / P⌉] = table[:⌈n / P⌉], table = slot_tables[s]

    slots: [B] int32, below 0 for padding, which gets token 0, position 0, slot -1, length 0. State: last_tokens, num_tokens:
    [S] int32 or int64, slot_tables: [S, M] int32. Outputs: token_ids, positions: [B] int64 or int32, slot_mapping: [B] int64
    (-1 where the table has no column for p), context_lens: [B] int32, block_tables: [B, M] int32, whose entries beyond the
    contexts are left unchanged. Numbers are not checked. Source: block tables of arXiv 2309.06180. Reads and writes 4 · Σ⌈n /
    P⌉ bytes and some 40 per row; only integers. Columns beyond a context are masked.
    """
    rows, columns = slots.shape[0], slot_tables.shape[1]
    assert block_tables.shape[1] >= columns, "a row's table is as wide as a slot's"
    if rows == 0:
        return
    prepare_decode_kernel[(rows, triton.cdiv(columns, COLUMNS))](
        slots, last_tokens, num_tokens, slot_tables, token_ids, positions, slot_mapping, context_lens, block_tables,
        columns, slot_tables.stride(0), block_tables.stride(0), block_size, COLUMNS, num_warps=4,
        **early_launch(slots.device, rows),
    )  # fmt: skip


def advance_slots(
    slots: torch.Tensor,
    sampled: torch.Tensor,
    last_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    host: HostTokens | None = None,
) -> None:
    """last_tokens[slots[i]] = max(0, sampled[i]); num_tokens[slots[i]] += 1; out[i] = sampled[i], padding included.
    If slots[0] ≥ 0: n = ++host.num_steps[0]; place = host.places[n mod D]; place[0] = n; place[1 + i] = sampled[i]

    slots: [B] int32, below 0 for padding, distinct except for those whose state does not matter any more; sampled: [B], below 0
    if no token could be drawn; in place. sampled, last_tokens, num_tokens and out (a copy that stays valid while the next step
    runs) are int32 or int64. The host reads `host` after the step; padding comes last, so a step whose first row is padding
    writes nothing there. Moves some 40 bytes per row, 8 of them to the host; only integers. A single program, because it
    increments num_steps. Rows beyond B and the state of padding are masked.
    """
    rows = slots.shape[0]
    if rows:
        places, num_steps = (None, None) if host is None else host
        depth, place_size = (1, 0) if places is None else places.shape
        # Launched as for one row: once per step, after the kernels that choose its tokens, in one variant for all sizes.
        advance_slots_kernel[(1,)](
            slots, sampled, last_tokens, num_tokens, out, places, num_steps, rows, place_size, depth, ROWS, num_warps=4,
            **early_launch(slots.device, 1),
        )  # fmt: skip
