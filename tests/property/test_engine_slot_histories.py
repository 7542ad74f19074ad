"""Random histories of scheduler, overlapped steps and slots together, on a fake device that fails at times: every launched step
reads its requests' blocks, lengths and last tokens from its slots.

`GATEHOUSE_SCRIPTS` sets the number of histories, 20 by default.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest

from tests.support.launched_fuzz import LaunchedFuzz, run_launched_script, run_script_of_many_answers
from tests.support.slot_device import SlotDevice

NUM_HISTORIES = int(os.environ.get("GATEHOUSE_SCRIPTS", "20"))


@pytest.mark.parametrize("first", range(0, NUM_HISTORIES, 10))
@pytest.mark.parametrize("run_history", [run_launched_script, run_script_of_many_answers])
def test_slots_hold_what_the_scheduler_plans_after_random_events_and_failures(
    run_history: Callable[..., LaunchedFuzz], first: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL + 1, "gatehouse.engine")
    num_checked = 0
    for seed in range(first, min(first + 10, NUM_HISTORIES)):
        device = run_history(seed, make_device=SlotDevice).device
        assert isinstance(device, SlotDevice)
        assert device.errors == []
        num_checked += device.num_checked
    assert num_checked > 1000
