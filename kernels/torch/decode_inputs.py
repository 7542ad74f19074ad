"""Inputs of the next decode step from the state of its slots, and their state after a step, without reading values on the
host."""

from __future__ import annotations

import torch

from kernels.host_tokens import HostTokens


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
    """Row i of the step is slot `slots[i]`, whose last token is not yet in the cache; a row below 0 is padding.

    Reads slots: [B] int32, last_tokens and num_tokens: [S], slot_tables: [S, M] int32. Writes token_ids: [B], positions: [B]
    (num_tokens - 1), slot_mapping: [B] int64 (-1 if the position is beyond the table), context_lens: [B] int32
    (num_tokens), block_tables: [B, M] int32, only the blocks that the context of a row reaches. Padding gets token 0,
    position 0, slot -1, length 0.
    """
    active = slots >= 0
    rows = slots.clamp_min(0).long()
    context = num_tokens.index_select(0, rows).where(active, 0).long()
    last = (context - 1).clamp_min_(0)
    columns = slot_tables.shape[1]
    column = last // block_size
    tables = slot_tables.index_select(0, rows)
    block = tables.gather(1, column.clamp_max(columns - 1)[:, None])[:, 0].long()
    token_ids.copy_(last_tokens.index_select(0, rows).where(active, 0))
    positions.copy_(last)
    slot_mapping.copy_((block * block_size + last % block_size).where(active & (column < columns) & (context > 0), -1))
    context_lens.copy_(context)
    reached = torch.arange(columns, device=slots.device) * block_size < context[:, None]
    block_tables.copy_(torch.where(reached, tables, block_tables))


def advance_slots(
    slots: torch.Tensor,
    sampled: torch.Tensor,
    last_tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    host: HostTokens | None = None,
) -> None:
    """The tokens of a step become the last of their slots, in place. They are also copied to `out` and, with the number of the
    step, to the next of `host.places`, unless all rows are padding. Padding comes last.

    slots: [B] int32, below 0 is padding; sampled: [B], below 0 if no token could be drawn; the slot then gets token 0.
    """
    active = slots >= 0
    rows = slots[active].long()
    last_tokens.index_copy_(0, rows, sampled[active].clamp_min(0).to(last_tokens.dtype))
    num_tokens.index_add_(0, rows, torch.ones_like(rows, dtype=num_tokens.dtype))
    if out is not None:
        out.copy_(sampled)
    if host is not None and len(slots) and slots[0] >= 0:
        host.num_steps.add_(1)
        entry = host.places[host.num_steps[0] % len(host.places)]
        entry[0] = host.num_steps[0]
        entry[1 : 1 + len(slots)] = sampled
