"""Slot state, on the CPU by default, and a slot table without a sampler, or with one that counts tokens."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch

from engine.runner.slots import SlotState, SlotTable, slot_words
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest
from kernels import ops

CPU = torch.device("cpu")


def slot_state(num_slots: int, max_blocks: int, device: torch.device = CPU) -> SlotState:
    return SlotState(slot_words({}, device, num_slots=num_slots, max_blocks=max_blocks))


class TokenCounts:
    """A listener that keeps, for each slot, its request and how many tokens of it the state of the slot includes."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Request, int]] = {}

    def assign(self, slots: Sequence[int], requests: Sequence[Request]) -> ops.Words:
        """A new request has no state yet."""
        self.held.update({slot: (request, 0) for slot, request in zip(slots, requests, strict=True)})
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)

    def restart(self, slot: int, request: Request, num_tokens: int) -> None:
        self.held[slot] = request, num_tokens


def slot_table(state: SlotState) -> SlotTable:
    nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    return SlotTable(state, mock.Mock(assign=mock.Mock(return_value=nothing)))


def make_batch(decodes: list[ScheduledRequest], grown: Sequence[Request] = ()) -> ScheduledBatch:
    """A step with these decodes, of which `grown` got blocks since the last one."""
    requests = [item.request for item in decodes]
    return ScheduledBatch(decodes, requests, [request.block_table for request in requests], [*grown])
