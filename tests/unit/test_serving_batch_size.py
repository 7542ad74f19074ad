"""The mean number of seats taken in an engine's batch while a request generated, from the engine's report of each step."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from appliance.base.db import Database
from appliance.metering.past_requests import PastRequests
from appliance.serving.batch_size import BatchSize
from appliance.serving.engine_stats import EngineStats
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.engine_messages import engine_status
from tests.support.generations import open_serving
from tests.support.polling import poll_until


def test_the_mean_of_any_window_is_that_of_samples_of_it() -> None:
    draw, size = random.Random(1), BatchSize()
    samples, moments = [], []
    for second in range(200):
        moments.append(size.at(second))
        if draw.random() < 0.4:
            size.note(draw.randrange(64), second)
        samples.append(size._seats)
        begin = draw.randrange(second + 1)
        taken = samples[begin : second + 1]
        assert size.mean_since(moments[begin], second + 1) == pytest.approx(sum(taken) / len(taken))


def test_a_window_without_length_has_no_mean() -> None:
    size = BatchSize()
    size.note(3, 1.0)
    assert size.mean_since(size.at(2.0), 2.0) is None


def test_seats_count_from_the_step_that_reports_them() -> None:
    stats = EngineStats()
    stats.note_status(engine_status(num_running=1), 10.0)
    begun = stats.batch_size.at(10.0)
    stats.note_status(engine_status(num_running=5), 13.0)  # as after the start of a request with four answers
    stats.note_status(engine_status(num_running=4), 15.0)  # and after a preemption
    assert stats.batch_size.mean_since(begun, 16.0) == (3 * 1 + 2 * 5 + 1 * 4) / 6


@pytest.mark.on_either_database
async def test_a_request_keeps_the_mean_from_its_first_token_to_its_end(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id) as serving:
        size = serving.model.engine.stats.batch_size
        size.note(60, clock.monotonic_s())
        clock.advance(5)
        serving.engine.allow_steps(0)
        generation = await serving.start(cast.bob, "the quick brown fox", max_tokens=500)
        clock.advance(5)  # in the queue
        generation.note_batch_size()
        before = generation.live.batch_size_mean
        serving.engine.allow_steps(1)
        await poll_until(lambda: generation.live.completion_tokens == 1)
        size.note(2, clock.monotonic_s())
        clock.advance(3)
        size.note(6, clock.monotonic_s())
        clock.advance(1)
        generation.note_batch_size()
        while_live = generation.live.batch_size_mean
        generation.end_early("disconnected")
        await generation.outcome
    past = await PastRequests(database).get(generation.request_id, access=OWNER)
    assert (before, while_live, past.batch_size_mean) == (None, 3.0, 3.0)
