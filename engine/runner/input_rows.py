"""The tensors of one forward pass, made from rows of tokens once per step, the same for all layers.

Order of the pass: rows of a single token first, longest context first (they attend in padded groups), then the longer ones
in the order given. `sampled_rows` leads back to the order of the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.layers.batch_inputs import BatchInputs
from engine.layers.rotary import RotaryTable
from kernels.ops import AnyPlan, AnyPlanner, AttentionRow, PagedPlan, PagedPlanner, send


class InputRow(NamedTuple):
    """Consecutive tokens of one request, the first at position `start`. `outputs` are the indices into them whose hidden
    states are wanted."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    outputs: Sequence[int] = ()


def forward_order(rows: Sequence[InputRow]) -> list[int]:
    """Indices of `rows` in the order of the forward pass."""
    single: list[int] = []
    longer: list[int] = []
    for index, row in enumerate(rows):
        (single if len(row.token_ids) == 1 else longer).append(index)
    starts = [row.start for row in rows]
    single.sort(key=starts.__getitem__, reverse=True)
    return single + longer


def make_batch_inputs(
    rows: Sequence[InputRow],
    *,
    block_size: int,
    rotaries: Sequence[RotaryTable],
    planners: Sequence[AnyPlanner],
    device: torch.device,
) -> BatchInputs:
    """Tensors for one pass over `rows`. Layers find their rotation and their attention plan by index."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    firsts = [0] * len(rows)
    attention_rows: list[AttentionRow] = []
    for index in forward_order(rows):
        ids, start, block_table, _ = rows[index]
        firsts[index] = len(token_ids)
        attention_rows.append(AttentionRow(block_table, len(ids), start + len(ids)))
        token_ids += ids
        if len(ids) == 1:
            positions.append(start)
            slots.append(block_table[start // block_size] * block_size + start % block_size)
        else:
            positions += range(start, start + len(ids))
            slots += _slots(block_table, start, start + len(ids), block_size)
    wanted = [first + output for first, row in zip(firsts, rows, strict=True) for output in row.outputs]
    num_tokens = len(token_ids)
    sent = send(token_ids + positions + slots + wanted, torch.int64, device)
    on_device = sent[num_tokens : 2 * num_tokens]
    return BatchInputs(
        token_ids=sent[:num_tokens],
        positions=on_device,
        rotations=tuple(rotary.at(on_device) for rotary in rotaries),
        slot_mapping=sent[2 * num_tokens : 3 * num_tokens],
        sampled_rows=None if len(wanted) == num_tokens and wanted == list(range(num_tokens)) else sent[3 * num_tokens :],
        attention=tuple(_plans(attention_rows, planners)),
    )


def _plans(rows: Sequence[AttentionRow], planners: Sequence[AnyPlanner]) -> Iterator[AnyPlan]:
    """The plan of each planner; all that read pages on the device share one copy of the block tables."""
    paged: PagedPlan | None = None
    for planner in planners:
        if not isinstance(planner, PagedPlanner):
            yield planner.plan(rows)
        else:
            paged = planner.plan(rows) if paged is None else planner.plan_like(paged)
            yield paged


def _slots(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    positions = np.arange(start, end)
    slots: list[int] = (np.asarray(block_table)[positions // block_size] * block_size + positions % block_size).tolist()
    return slots
