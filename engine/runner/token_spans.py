"""Builds the inputs of a forward pass on the host, from spans of tokens: once per step, the same for all layers.

Order of the pass: spans of a single token first, longest context first (they attend in padded groups), then the longer ones
in the order given. `sampled_rows` restores the order of the spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.layers.forward_inputs import ForwardInputs
from engine.layers.rotary import RotaryTable
from kernels.ops import AnyPlan, AnyPlanner, AttentionRow, PagedPlan, PagedPlanner, send


class TokenSpan(NamedTuple):
    """Consecutive tokens of one request, the first at position `start`. `outputs` are the indices into them whose hidden
    states are needed."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    outputs: Sequence[int] = ()


def forward_order(spans: Sequence[TokenSpan]) -> list[int]:
    """Indices of `spans` in the order of the forward pass."""
    single: list[int] = []
    longer: list[int] = []
    for index, span in enumerate(spans):
        (single if len(span.token_ids) == 1 else longer).append(index)
    starts = [span.start for span in spans]
    single.sort(key=starts.__getitem__, reverse=True)
    return single + longer


def make_forward_inputs(
    spans: Sequence[TokenSpan],
    *,
    block_size: int,
    rotaries: Sequence[RotaryTable],
    planners: Sequence[AnyPlanner],
    device: torch.device,
) -> ForwardInputs:
    """Tensors for one pass over `spans`. Layers find their rotation and their attention plan by index."""
    token_ids: list[int] = []
    positions: list[int] = []
    slot_mapping: list[int] = []
    firsts = [0] * len(spans)
    attention_rows: list[AttentionRow] = []
    for index in forward_order(spans):
        ids, start, block_table, _ = spans[index]
        firsts[index] = len(token_ids)
        attention_rows.append(AttentionRow(block_table, len(ids), start + len(ids)))
        token_ids += ids
        if len(ids) == 1:
            positions.append(start)
            slot_mapping.append(block_table[start // block_size] * block_size + start % block_size)
        else:
            positions += range(start, start + len(ids))
            slot_mapping += cache_slots(block_table, start, start + len(ids), block_size).tolist()
    sampled_rows = [first + output for first, span in zip(firsts, spans, strict=True) for output in span.outputs]
    num_tokens = len(token_ids)
    is_every_row = len(sampled_rows) == num_tokens and sampled_rows == list(range(num_tokens))
    packed = send(token_ids + positions + slot_mapping + sampled_rows, torch.int64, device)
    device_positions = packed[num_tokens : 2 * num_tokens]
    return ForwardInputs(
        token_ids=packed[:num_tokens],
        positions=device_positions,
        rotations=tuple(rotary.at(device_positions) for rotary in rotaries),
        slot_mapping=packed[2 * num_tokens : 3 * num_tokens],
        sampled_rows=None if is_every_row else packed[3 * num_tokens :],
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


def cache_slots(block_table: Sequence[int], start: int, end: int, block_size: int) -> np.ndarray[Any, Any]:
    """Where the keys and values of positions `start` to `end` are in the cache: [end - start] int64"""
    positions = np.arange(start, end)
    slots: np.ndarray[Any, Any] = np.asarray(block_table)[positions // block_size] * block_size + positions % block_size
    return slots
