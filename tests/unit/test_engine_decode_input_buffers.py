"""Rows of a decode step: which request has which row, and when they need not be sent again."""

from __future__ import annotations

from unittest import mock

import torch

from engine.runner.decode_input_buffers import DecodeInputBuffers
from engine.runner.decode_step import NO_INPUTS
from engine.runner.slots import NOTHING
from tests.support.slots import slot_state

SLOTS = [2]


def input_buffers() -> DecodeInputBuffers:
    decoder = mock.Mock(max_verify_group=1, dtype=torch.float32)
    inputs = DecodeInputBuffers(slot_state(4, 3), decoder, max_rows=4, block_size=2)
    inputs.write_slots([3, 1, 0, 2], 4)
    return inputs


def test_the_same_slots_in_a_step_of_more_rows_are_padded_anew() -> None:
    """Behind them stand rows of an earlier step, which would be computed once more."""
    inputs = input_buffers()
    inputs.write_slots(SLOTS, 1)
    assert inputs.slots.tolist() == [2, 1, 0, 2]
    inputs.write_slots(SLOTS, 3)
    assert inputs.slots[:3].tolist() == [2, NOTHING, NOTHING]


def test_the_very_slots_of_the_last_step_are_not_sent_again_and_equal_ones_are() -> None:
    inputs = input_buffers()
    with mock.patch.object(inputs._staging, "send", wraps=inputs._staging.send) as send:
        for slots, times in ((SLOTS, 1), (SLOTS, 1), ([*SLOTS], 2)):
            inputs.write_slots(slots, 2)
            assert send.call_count == times


def test_slots_are_sent_again_behind_a_step_whose_inputs_the_host_has_written() -> None:
    inputs = input_buffers()
    inputs.write_slots(SLOTS, 1)
    inputs.write_columns(NO_INPUTS, 1)
    inputs.write_slots(SLOTS, 1)
    assert inputs.slots[:1].tolist() == SLOTS
