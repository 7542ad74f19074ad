"""Slot state, on the CPU by default, and a slot table without a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch

from engine.runner.slots import SlotState, SlotTable, slot_words
from engine.scheduling.request import Request
from engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledRequest

CPU = torch.device("cpu")


def slot_state(num_slots: int, max_blocks: int, device: torch.device = CPU) -> SlotState:
    return SlotState(slot_words({}, device, num_slots=num_slots, max_blocks=max_blocks))


def slot_table(state: SlotState) -> SlotTable:
    nothing = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int32)
    return SlotTable(state, mock.Mock(assign=mock.Mock(return_value=nothing)))


def make_batch(decodes: list[ScheduledRequest], grown: Sequence[Request] = ()) -> ScheduledBatch:
    """A step with these decodes, of which `grown` got blocks since the last one."""
    requests = [item.request for item in decodes]
    return ScheduledBatch(decodes, requests, [request.block_table for request in requests], [*grown])
