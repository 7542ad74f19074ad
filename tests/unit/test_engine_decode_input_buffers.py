"""Slots of a decode step on the device: padding, and when they are sent again."""

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


def test_a_step_with_more_rows_for_the_same_slots_pads_the_added_rows() -> None:
    """The buffer still holds slots of an earlier step there, which would be computed again."""
    inputs = input_buffers()
    inputs.write_slots(SLOTS, 1)
    assert inputs.slots.tolist() == [2, 1, 0, 2]
    inputs.write_slots(SLOTS, 3)
    assert inputs.slots[:3].tolist() == [2, NOTHING, NOTHING]


def test_slots_are_sent_again_unless_they_are_the_same_list_object() -> None:
    inputs = input_buffers()
    with mock.patch.object(inputs._staging, "send", wraps=inputs._staging.send) as send:
        for slots, num_sent in ((SLOTS, 1), (SLOTS, 1), ([*SLOTS], 2)):
            inputs.write_slots(slots, 2)
            assert send.call_count == num_sent


def test_slots_are_sent_again_after_the_host_wrote_the_inputs() -> None:
    inputs = input_buffers()
    inputs.write_slots(SLOTS, 1)
    inputs.write_columns(NO_INPUTS, 1)
    inputs.write_slots(SLOTS, 1)
    assert inputs.slots[:1].tolist() == SLOTS
