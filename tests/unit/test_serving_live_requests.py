"""A live request: its speed, by the engine's clock where tokens are read late, and how many requests came before it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from appliance.base.db import Database
from appliance.metering.past_requests import PastRequests
from appliance.serving.live_requests import LiveRequest
from appliance.tenancy.principals import Limits
from appliance.tenancy.tiers import Tiers
from engine.protocol import FinishReason, TokenEvent
from tests.support.cast import OWNER, Cast, make_person
from tests.support.clock import FakeClock
from tests.support.fake_engine import STALL
from tests.support.generations import MODEL, open_serving
from tests.support.ledgers import num_waiting
from tests.support.polling import poll_until
from tests.support.scheduling import apply_outputs, make_request, make_scheduler, step

NOW = datetime(2026, 11, 29, tzinfo=UTC)


def _live() -> LiveRequest:
    return LiveRequest(
        id="req_1", tenant_id="t", tenant_name="bob", key_id="k", key_prefix="gh_", model="tiny", endpoint="chat",
        stream=False, prompt_tokens=3, admitted_at=NOW, admitted_monotonic_s=0.0,
    )  # fmt: skip


def _event(number: int, **changes: object) -> TokenEvent:
    return TokenEvent("req_1", [7], number, 3, **changes)  # type: ignore[arg-type]


def test_an_answer_received_in_one_burst_has_the_engines_speed() -> None:
    live = _live()
    live.apply_event(_event(1), monotonic_s=1.0)
    live.apply_event(_event(2), monotonic_s=1.00006)
    live.apply_event(_event(3, finish_reason=FinishReason.LENGTH, decode_s=0.02), monotonic_s=1.00012)
    assert live.tokens_per_second == pytest.approx(100.0)


def test_an_answer_that_arrives_in_one_event_has_a_speed() -> None:
    live = _live()
    live.apply_event(replace(_event(2, finish_reason=FinishReason.LENGTH, decode_s=0.02), token_ids=[5, 5]), monotonic_s=1.0)
    assert live.tokens_per_second == pytest.approx(50.0)


def test_the_end_of_one_answer_never_shortens_the_decode_time_of_several() -> None:
    live = _live()
    live.apply_event(_event(1), monotonic_s=1.0)
    live.apply_event(_event(1, index=1), monotonic_s=1.0)
    live.apply_event(_event(2, finish_reason=FinishReason.LENGTH, decode_s=0.5), monotonic_s=1.0001)
    live.apply_event(_event(2, index=1, finish_reason=FinishReason.LENGTH, decode_s=0.1), monotonic_s=1.0002)
    assert live.decode_s == pytest.approx(0.5)


def test_the_final_event_carries_the_time_from_first_to_last_token() -> None:
    clock = FakeClock()
    scheduler = make_scheduler(clock=clock.monotonic_s)
    scheduler.add(make_request("a", 6, max_tokens=3))
    events = []
    while scheduler.has_requests:
        batch = scheduler.schedule()
        clock.advance(0.25)
        events += apply_outputs(scheduler, batch)
    assert [event.decode_s for event in events] == [0.0, 0.0, 0.5]


def test_an_aborted_answer_carries_no_decode_time() -> None:
    scheduler = make_scheduler()
    request = make_request("a", 6)
    scheduler.add(request)
    step(scheduler)
    event = scheduler.abort(request)
    assert event is not None
    assert event.decode_s == 0.0


@pytest.mark.on_either_database
async def test_a_past_request_also_shows_how_many_of_its_tenant_came_before_it(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id) as serving:
        of_another, first = [await serving.start(who, [STALL, 5]) for who in (cast.charlie, cast.bob)]
        second = await serving.start(cast.bob, "the quick brown fox")
        await second.outcome
        for running in (of_another, first):
            serving.generations.abort(running.request_id, access=OWNER)
            await running.outcome
    past = PastRequests(database)
    found = [await past.get(generation.request_id, access=OWNER) for generation in (first, second)]
    assert [row.tenant_open for row in found] == [0, 1]


@pytest.mark.on_either_database
async def test_a_past_request_shows_its_wait_for_limits_also_where_the_price_changed_meanwhile(
    database: Database, clock: FakeClock, cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Tiers(database, clock).update("standard", admission_wait_ms=60_000)
    dora = await make_person(database, clock, "dora", Limits(concurrent_requests=1))
    async with open_serving(database, clock, tmp_path / "model", cast.epoch_id) as serving:
        running = await serving.start(dora, [STALL, 5])
        waiting = asyncio.create_task(serving.start(dora, "the quick brown fox"))
        await poll_until(lambda: num_waiting(serving.admission) == 1)
        soon = clock.now() + timedelta(seconds=1)
        await serving.generations._prices.add(
            model=MODEL, effective_from=soon, currency="EUR", prompt=1, cached_prompt=1, completion=1
        )
        clock.advance(3)
        running.end_early("disconnected")
        generation = await waiting
        await generation.outcome
    past = PastRequests(database)
    rows = [await past.get(each.request_id, access=OWNER) for each in (running, generation)]
    assert [(row.admission_wait_s, row.awaited_limit) for row in rows] == [(0.0, None), (3.0, "tenant_concurrency")]
    assert (generation.live.ttft_s or 0.0) < 3
