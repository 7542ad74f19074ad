"""After a crash every admitted request is in the ledger once, and none stays pending."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from sqlalchemy import text

from appliance.base.db import Database
from appliance.base.errors import RateLimitExceeded
from appliance.metering.ledger import recovery
from appliance.metering.ledger.epochs import EpochEnded, begin_epoch
from appliance.metering.ledger.records import Usage
from appliance.metering.ledger.round import LedgerBroken
from appliance.metering.ledger.rows import EVENTS_WITH_PRICES, INSERT_EVENTS, event_row
from appliance.metering.limits.owners import Owner
from appliance.metering.limits.windows import Moment
from appliance.metering.past_requests import PastRequests
from appliance.tenancy.principals import Limits
from tests.support.cast import OWNER, Cast, make_cast
from tests.support.clock import FakeClock
from tests.support.databases import Cluster
from tests.support.factories import admission_request, pending, posted
from tests.support.ledgers import (
    all_events,
    euro_prices,
    running_ledger,
    settle,
    utc_admission,
    utc_ledger,
    utc_recover,
    utc_sums,
)
from tests.support.query_plans import query_plan


async def test_a_request_of_a_dead_process_is_recovered_once_from_its_last_checkpoint(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    price = await euro_prices(database, clock).add(
        model="demo", currency="EUR", prompt=1_000_000, cached_prompt=0, completion=2_000_000, rejected_draft=500_000
    )
    seen, unseen, done = pending(cast.bob, price=price), pending(cast.bob, price=price), pending(cast.bob, price=price)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for entry in (seen, unseen, done):
            await ledger.open(entry)
        counts = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 3, "rejected_tokens": 7}
        ledger.checkpoint({seen.request_id: Usage(**counts)})
        settled = await settle(ledger, posted(done.request_id))
    epoch = await begin_epoch(database, clock, "next")
    clock.advance(60)
    assert await utc_recover(database, clock, epoch) == 2
    assert await utc_recover(database, clock, epoch) == 0
    first, second, third = await all_events(database)
    assert (first.status, first.estimated, first.finish_reason, first.settled_at) == ("recovered", True, "error", clock.now())
    assert {name: getattr(first, name) for name in counts} == counts
    assert (first.cost_picos, first.cause) == (6 * 1_000_000 + 3 * 2_000_000 + 7 * 500_000, "gateway_died")
    assert (second.status, second.prompt_tokens, second.cost_picos) == ("recovered", 0, 0)
    assert third == settled
    row = await PastRequests(database).get(seen.request_id, access=OWNER)
    assert (row.finish_reason, row.completion_tokens, row.prompt_tokens) == ("error", 3, 10)
    assert row.finished_at == clock.now()


@pytest.mark.postgres
async def test_a_record_committed_by_the_server_after_its_gateway_died_is_recovered_too(
    postgresql: Cluster, clock: FakeClock
) -> None:
    url = postgresql.acquire()
    database = Database.open(url)
    cast = await make_cast(database, clock)
    epoch = await begin_epoch(database, clock, "next")
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
    async with database.writing() as dying:
        row = event_row(pending(cast.bob), cast.epoch_id, "EUR", clock.now().date())
        await dying.run_sync(INSERT_EVENTS.execute, [row])
        recovering = asyncio.create_task(utc_recover(database, clock, epoch))
        async with asyncio.timeout(60), database.reading() as watching:
            while not (await watching.execute(waiting)).scalar_one():  # noqa: ASYNC110 - the server has no event
                await asyncio.sleep(0)
        assert not recovering.done()
    assert await recovering == 1
    assert [event.status for event in await all_events(database)] == ["recovered"]
    await database.close()
    postgresql.release(url)


async def test_the_running_epoch_is_left_alone(database: Database, clock: FakeClock, cast: Cast) -> None:
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(pending(cast.bob))
        assert await utc_recover(database, clock, cast.epoch_id) == 0
    assert [event.status for event in await all_events(database)] == ["pending"]


async def test_a_settlement_after_recovery_raises(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry = pending(cast.bob)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(entry)
        await utc_recover(database, clock, await begin_epoch(database, clock, "next"))
        with pytest.raises(LedgerBroken, match="recovered"):
            await ledger.settle(posted(entry.request_id))


async def test_concurrent_recoveries_count_each_event_once(database: Database, clock: FakeClock, cast: Cast) -> None:
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await asyncio.gather(*(ledger.open(pending(cast.bob)) for _ in range(20)))
    epoch = await begin_epoch(database, clock, "next")
    await asyncio.gather(utc_recover(database, clock, epoch), utc_recover(database, clock, epoch))
    assert [event.status for event in await all_events(database)] == ["recovered"] * 20


async def test_events_beyond_one_transaction_are_all_recovered(
    database: Database, clock: FakeClock, cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "EVENTS_PER_TRANSACTION", 4)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await asyncio.gather(*(ledger.open(pending(cast.bob)) for _ in range(8)))
    assert await utc_recover(database, clock, await begin_epoch(database, clock, "next")) == 8


async def test_a_writer_killed_between_open_and_settle_loses_nothing(database: Database, clock: FakeClock, cast: Cast) -> None:
    entries = [pending(cast.bob) for _ in range(30)]
    ledger = utc_ledger(database, clock, cast.epoch_id)
    await ledger.start()
    await asyncio.gather(*(ledger.open(entry) for entry in entries))
    await asyncio.gather(*(ledger.settle(posted(entry.request_id)) for entry in entries[:10]))
    assert ledger._task is not None
    ledger._task.cancel()  # the process dies: what was not committed is gone
    await asyncio.wait({ledger._task})
    await utc_recover(database, clock, await begin_epoch(database, clock, "next"))
    events = await all_events(database)
    assert [event.request_id for event in events] == [entry.request_id for entry in entries]
    assert [event.status for event in events] == ["posted"] * 10 + ["recovered"] * 20


async def test_recovered_tokens_count_in_the_sums_of_day_and_month(database: Database, clock: FakeClock, cast: Cast) -> None:
    price = await euro_prices(database, clock).add(model="demo", currency="EUR", prompt=5, cached_prompt=5, completion=5)
    yesterday, charlies = pending(cast.bob, price=price), pending(cast.charlie, price=price)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await ledger.open(yesterday)
        await ledger.settle(posted(yesterday.request_id, prompt=1000, completion=0))
    clock.advance(86400)
    today = [pending(cast.bob, price=price, admitted_at=clock.now()), charlies]
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for opened in today:
            await ledger.open(opened)
        ledger.checkpoint({e.request_id: Usage(prompt_tokens=10, completion_tokens=5) for e in today})
    await utc_recover(database, clock, await begin_epoch(database, clock, "next"))
    for owner in (Owner("tenant", cast.bob.tenant.id), Owner("key", cast.bob.key.id), Owner("key", cast.bob.key.id, "demo")):
        at = Moment(clock.now(), clock.monotonic_s(), clock.now().date(), clock.now())
        sums = (await utc_sums(database).read({owner: "EUR"}, at))[owner]
        assert (sums.tokens_today, sums.cost_month_picos) == (15, 1015 * 5)
        abroad = (await utc_sums(database).read({owner: "CHF"}, at))[owner]
        assert (abroad.tokens_today, abroad.cost_month_picos) == (15, 0), "a sum over two currencies"


async def test_a_restart_refills_no_bucket(database: Database, clock: FakeClock, cast: Cast) -> None:
    limits = Limits(tokens_per_minute=600, requests_per_minute=6)
    bob = dataclasses.replace(cast.bob.principal, tenant=dataclasses.replace(cast.bob.tenant, limits=limits))
    before = utc_admission(clock, utc_sums(database))
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for tokens in (100, 250, 200):
            reservation = await before.admit(admission_request(bob, tokens))
            entry = pending(cast.bob, admitted_at=clock.now())
            await ledger.open(entry)
            await ledger.settle(posted(entry.request_id, prompt=tokens, completion=0))
            reservation.settle(tokens)
            clock.advance(2.5)
    after = utc_admission(clock, utc_sums(database))
    for admission in (before, after):
        with pytest.raises(RateLimitExceeded) as refused:
            await admission.admit(admission_request(bob, 300))
        assert refused.value.retry_after_s == 17.5
    assert before.snapshot(bob) == after.snapshot(bob)
    clock.advance(60)
    await after.admit(admission_request(bob, 600))


async def test_a_superseded_epoch_recovers_nothing_of_its_successor(database: Database, clock: FakeClock, cast: Cast) -> None:
    entry, later = pending(cast.bob), await begin_epoch(database, clock, "later")
    async with running_ledger(database, clock, later) as ledger:
        await ledger.open(entry)
        with pytest.raises(EpochEnded, match="another Gatehouse"):
            await utc_recover(database, clock, cast.epoch_id)

        assert (await settle(ledger, posted(entry.request_id))).status == "posted"


@pytest.mark.postgres
async def test_a_superseded_epoch_opens_nothing(postgresql: Cluster, clock: FakeClock) -> None:
    url = postgresql.acquire()
    database = Database.open(url)
    cast = await make_cast(database, clock)
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        await begin_epoch(database, clock, "later")
        with pytest.raises(LedgerBroken, match="another Gatehouse"):
            await ledger.open(pending(cast.bob))

        assert not ledger.healthy
    assert await all_events(database) == []
    await database.close()
    postgresql.release(url)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_recovery_finds_pending_events_by_their_index(database: Database) -> None:
    events = EVENTS_WITH_PRICES.params(request_ids=["one", "another"])
    pending = recovery._pending_of_dead_epochs("now")
    assert await query_plan(database, pending) == ["SCAN usage_events USING INDEX ix_usage_events_pending"]
    assert await query_plan(database, events) == ["SEARCH usage_events USING INDEX uq_usage_events_request_id (request_id=?)"]
