"""Random lives of an engine that launches steps ahead of a device that fails now and then: every answer has the tokens that it
has alone, every token is counted and charged once, and every block comes back.

`GATEHOUSE_SCRIPTS=10000` runs as many lives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest

from engine.protocol import FinishReason
from tests.support.launched_fuzz import LaunchedFuzz, run_launched_script, run_script_of_many_answers

NUM_LIVES = int(os.environ.get("GATEHOUSE_SCRIPTS", "20"))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL + 1, "gatehouse.engine")


@pytest.mark.parametrize("first", range(0, NUM_LIVES, 10))
@pytest.mark.parametrize("run_life", [run_launched_script, run_script_of_many_answers])
def test_whatever_happens_each_answer_has_its_own_tokens(run_life: Callable[[int], LaunchedFuzz], first: int) -> None:
    lives = [run_life(seed) for seed in range(first, min(first + 10, NUM_LIVES))]
    assert sum(len(life.ended) for life in lives) > 100


def test_lives_contain_what_they_are_to_test() -> None:
    lives = [run_launched_script(seed) for seed in range(12)]
    assert sum(life.engine.fallbacks.count for life in lives) > 0
    assert sum(life.scheduler.totals.preemptions for life in lives) > 0
    assert sum(life.scheduler.totals.accepted_draft_tokens for life in lives) > 0
    assert sum(life.scheduler.totals.prefix_cache_hit_tokens for life in lives) > 0
    assert sum(life.scheduler.kv.num_swapped_in for life in lives) > 0
    assert {event.finish_reason for life in lives for event in life.ended.values()} == set(FinishReason) - {
        FinishReason.OVERLOADED
    }
