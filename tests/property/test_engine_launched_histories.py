"""Random histories of an engine with steps launched ahead, on a fake device that fails at times: every answer has the tokens
that it has alone, every token is counted and charged once, and every block is freed.

`GATEHOUSE_SCRIPTS` sets the number of histories, 20 by default.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest

from engine.protocol import FinishReason
from tests.support.launched_fuzz import LaunchedFuzz, run_launched_script, run_script_of_many_answers

NUM_HISTORIES = int(os.environ.get("GATEHOUSE_SCRIPTS", "20"))


@pytest.fixture(autouse=True)
def _silent_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "gatehouse.engine")


@pytest.mark.parametrize("first", range(0, NUM_HISTORIES, 10))
@pytest.mark.parametrize("run_history", [run_launched_script, run_script_of_many_answers])
def test_every_answer_has_the_tokens_it_has_alone_after_random_events_and_failures(
    run_history: Callable[[int], LaunchedFuzz], first: int
) -> None:
    histories = [run_history(seed) for seed in range(first, min(first + 10, NUM_HISTORIES))]
    assert sum(len(history.ended) for history in histories) > 100


def test_random_histories_contain_all_events_under_test() -> None:
    histories = [run_launched_script(seed) for seed in range(12)]
    assert sum(history.engine.fallbacks.count for history in histories) > 0
    assert sum(history.scheduler.totals.preemptions for history in histories) > 0
    assert sum(history.scheduler.totals.accepted_draft_tokens for history in histories) > 0
    assert sum(history.scheduler.totals.prefix_cache_hit_tokens for history in histories) > 0
    assert sum(history.scheduler.kv.num_swapped_in for history in histories) > 0
    assert {event.finish_reason for history in histories for event in history.ended.values()} == set(FinishReason) - {
        FinishReason.OVERLOADED
    }
