"""Turns a scheduled batch of integers into the tensors of one forward pass, once per step, the same for all layers.

Rows of the pass: requests with a single token first, longest context first (they attend in padded groups), then the longer
chunks in the order of the batch. `sampled_rows` leads back to the order of `ScheduledBatch.items`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.layers.rotary import RotaryTable, Rotation
from engine.scheduled_batch import ScheduledRequest
from kernels.ops import AttentionPlan, AttentionPlanner, AttentionRow


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """Everything a decoder needs to know about one step."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    rotations: tuple[Rotation, ...]  # one for each of the model's `ropes`
    slot_mapping: torch.Tensor  # [T] int64: block · P + offset
    sampled_rows: torch.Tensor  # [B_sampled] int64, in the order of the batch's items
    attention: tuple[AttentionPlan, ...]  # one for each of the model's `windows`


def forward_order(items: Sequence[ScheduledRequest]) -> list[int]:
    """Indices of `items` in the order of the forward pass."""
    return sorted(
        range(len(items)), key=lambda i: (items[i].num_tokens > 1, -items[i].start if items[i].num_tokens == 1 else i)
    )


def make_batch_inputs(
    items: Sequence[ScheduledRequest],
    *,
    block_size: int,
    rotaries: Sequence[RotaryTable],
    planners: Sequence[AttentionPlanner],
    device: torch.device,
) -> BatchInputs:
    """Tensors for one step over `items`. Layers find their rotation and their attention plan by index."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last_row: dict[int, int] = {}
    rows: list[AttentionRow] = []
    for index in forward_order(items):
        item = items[index]
        request, end = item.request, item.start + item.num_tokens
        token_ids += request.token_ids[item.start : end]
        positions += range(item.start, end)
        slots += _slots(request.block_table, item.start, end, block_size)
        rows.append(AttentionRow(request.block_table, item.num_tokens, end))
        last_row[index] = len(token_ids) - 1
    on_device = torch.tensor(positions, dtype=torch.int64).to(device)
    return BatchInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64).to(device),
        positions=on_device,
        rotations=tuple(rotary.at(on_device) for rotary in rotaries),
        slot_mapping=torch.tensor(slots, dtype=torch.int64).to(device),
        sampled_rows=torch.tensor([last_row[i] for i, item in enumerate(items) if item.samples], dtype=torch.int64).to(device),
        attention=tuple(planner.plan(rows) for planner in planners),
    )


def _slots(block_table: Sequence[int], start: int, end: int, block_size: int) -> list[int]:
    if end - start == 1:
        return [block_table[start // block_size] * block_size + start % block_size]
    positions = np.arange(start, end)
    slots: list[int] = (np.asarray(block_table)[positions // block_size] * block_size + positions % block_size).tolist()
    return slots
