"""Inputs of the next decode step from the state of its slots, row by row."""

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
    for row, slot in enumerate(slots.tolist()):
        length = int(num_tokens[slot]) if slot >= 0 else 0
        token_ids[row] = last_tokens[slot] if slot >= 0 else 0
        positions[row] = max(0, length - 1)
        context_lens[row] = length
        slot_mapping[row] = -1
        column, offset = divmod(max(0, length - 1), block_size)
        if length > 0 and column < slot_tables.shape[1]:
            slot_mapping[row] = int(slot_tables[slot, column]) * block_size + offset
        for index in range(min(slot_tables.shape[1], -(-length // block_size))):
            block_tables[row, index] = slot_tables[slot, index]


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
    if host is not None and slots.tolist()[:1] > [-1]:
        host.num_steps[0] += 1
        step_number = int(host.num_steps[0])
        host.places[step_number % len(host.places), : 1 + len(slots)] = torch.tensor([step_number, *sampled.tolist()])
    for row, slot in enumerate(slots.tolist()):
        if out is not None:
            out[row] = sampled[row]
        if slot >= 0:
            last_tokens[slot] = max(0, int(sampled[row]))
            num_tokens[slot] += 1
