"""Request history is deleted by age, in small batches; billing records and running requests are kept."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import func, select

from appliance.base.db import Database
from appliance.base.tables import requests
from appliance.metering import past_request_pruning
from appliance.metering.past_request_pruning import PastRequestPruner
from tests.support import factories
from tests.support.cast import Cast
from tests.support.clock import START, FakeClock
from tests.support.ledgers import all_events, running_ledger


async def left(database: Database) -> int:
    async with database.reading() as connection:
        return int((await connection.execute(select(func.count()).select_from(requests))).scalar_one())


@pytest.fixture
async def history(database: Database, clock: FakeClock, cast: Cast) -> PastRequestPruner:
    """Five finished requests of days 0 to 4, and one of day 0 that still runs. It is day 10, and 7 days are kept."""
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for day in range(5):
            entry = factories.pending(cast.bob, admitted_at=START + timedelta(days=day))
            await ledger.open(entry)
            await ledger.settle(factories.posted(entry.request_id))
        await ledger.open(factories.pending(cast.bob))
    clock.advance(10 * 86400)
    return PastRequestPruner(database, clock, keep_days=7)


async def test_requests_beyond_the_retention_period_are_deleted_and_usage_events_are_kept(
    database: Database, history: PastRequestPruner
) -> None:
    assert await history.prune() == 3
    assert await history.prune() == 0
    assert await left(database) == 3
    assert len(await all_events(database)) == 6


async def test_a_call_deletes_a_bounded_amount_and_the_next_continues(
    database: Database, history: PastRequestPruner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past_request_pruning, "BATCH_ROWS", 1)
    assert [await history.prune(2), await history.prune(2), await history.prune(2)] == [2, 1, 0]
