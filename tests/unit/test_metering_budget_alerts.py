"""Budget alerts: in the settling transaction, once per threshold, month and budget, and again for a raised budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from appliance.base import counters
from appliance.base.db import Database
from appliance.metering.alerts.budgets import PERIODS_MAX, SWEEP_INTERVAL_S, ThresholdTracker
from appliance.metering.alerts.outbox_pruning import KEEP_DAYS_MIN, OutboxPruner
from appliance.metering.alerts.rules import AlertRule, Period
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.limits.owners import ALL_TENANTS, Owner
from appliance.tenancy.access import WHOLE_APPLIANCE
from appliance.tenancy.principals import Limits, TenantChanges
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, AlertParts, alert_parts
from tests.support.cast import Cast, Person
from tests.support.clock import START, FakeClock
from tests.support.factories import adjustment, settled_event
from tests.support.ledgers import FailingDatabase, poll_until
from tests.support.spending import UNIT, Spender, alert_period_and_percent, record_statements, running_spender, set_budget


@pytest.fixture
async def spender(database: Database, clock: FakeClock, cast: Cast) -> AsyncIterator[Spender]:
    """A running ledger, and one webhook of the appliance that hears everything."""
    async with running_spender(await listening(database, clock), cast.epoch_id) as spender:
        yield spender


async def listening(database: Database, clock: FakeClock) -> AlertParts:
    """Return alerts that one webhook of the appliance hears all of."""
    alerts = alert_parts(database, clock)
    await alerts.webhooks.create(kind="webhook", target=TARGET, access=WHOLE_APPLIANCE)
    return alerts


async def test_each_threshold_is_told_once_when_it_is_reached(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 100)
    for units, told in ((79, 0), (1, 1), (10, 1), (9, 1), (1, 2), (50, 2)):
        await spender.spend(cast.bob, units)
        assert len(await spender.alerts_sent()) == told
    messages = await spender.alerts.messages()
    assert [alert_period_and_percent(message) for message in messages] == [("2026-11", 80), ("2026-11", 100)]
    assert messages[0].event == "budget.threshold"
    assert messages[0].payload["data"] == {
        "scope": "tenant",
        "tenant_id": cast.bob.tenant.id,
        "tenant_name": "bob",
        "percent": 80,
        "month": "2026-11",
        "monthly_budget": 100 * UNIT,
        "spent_picos": 80 * 10**12,
        "currency": "EUR",
    }


async def test_two_thresholds_that_are_reached_at_once_are_both_told(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 10)
    await spender.spend(cast.bob, 25)
    assert sorted(await spender.alerts_sent()) == [("2026-11", 80), ("2026-11", 100)]


async def test_the_percentages_of_the_tenant_count_and_an_empty_list_is_none(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 3, alert_percents=[33, 34])
    await set_budget(database, clock, cast.charlie, 3, alert_percents=[])
    await spender.spend(cast.bob, 1)
    assert await spender.alerts_sent() == [("2026-11", 33)]  # a third is more than 33 % and less than 34 %
    await spender.spend(cast.bob, 1)
    await spender.spend(cast.charlie, 5)
    assert sorted(await spender.alerts_sent()) == [("2026-11", 33), ("2026-11", 34)]


async def test_a_tenant_without_a_budget_or_with_one_of_nothing_has_no_alerts(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.charlie, 0)
    for person in (cast.bob, cast.charlie):
        await spender.spend(person, 1000)
    await spender.budgets.sweep()
    assert await spender.alerts_sent() == []


async def test_another_budget_is_told_of_anew_and_the_old_one_not_again(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 100)
    await spender.spend(cast.bob, 80)
    await set_budget(database, clock, cast.bob, 1000)
    await spender.spend(cast.bob, 719)
    assert len(await spender.alerts_sent()) == 1
    await spender.spend(cast.bob, 1)
    assert await spender.alerts_sent() == [("2026-11", 80)] * 2
    await set_budget(database, clock, cast.bob, 100)
    await spender.spend(cast.bob, 1)
    assert sorted(await spender.alerts_sent()) == [("2026-11", 80), ("2026-11", 80), ("2026-11", 100)]


async def test_each_month_of_the_billing_zone_has_its_own_alerts(database: Database, clock: FakeClock, cast: Cast) -> None:
    await set_budget(database, clock, cast.bob, 10)
    calendar = BillingCalendar("Pacific/Auckland")
    async with running_spender(await listening(database, clock), cast.epoch_id, calendar=calendar) as spender:
        await spender.spend(cast.bob, 8, at=datetime(2026, 11, 30, 10, 59, tzinfo=UTC))
        await spender.spend(cast.bob, 8, at=datetime(2026, 11, 30, 11, 0, tzinfo=UTC))  # midnight there
    assert await spender.alerts_sent() == [("2026-11", 80), ("2026-12", 80)]


async def test_the_tokens_of_the_day_are_watched_too(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await Tenants(database, clock).update(
        cast.bob.tenant.id, TenantChanges(limits=Limits(tokens_per_day=100)), access=WHOLE_APPLIANCE
    )
    for units in (79, 1, 19, 1):
        await spender.spend(cast.bob, units)
    clock.advance(86400)
    await spender.spend(cast.bob, 80)
    assert await spender.alerts_sent() == [("2026-11-21", 80), ("2026-11-21", 100), ("2026-11-22", 80)]
    message = (await spender.alerts.messages())[0]
    assert message.event == "tokens_per_day.threshold"
    assert (message.payload["data"]["tokens"], message.payload["data"]["tokens_per_day"]) == (80, 100)


async def test_tokens_of_a_later_day_do_not_count_for_an_earlier_one_that_settles_late(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await Tenants(database, clock).update(
        cast.bob.tenant.id, TenantChanges(limits=Limits(tokens_per_day=100)), access=WHOLE_APPLIANCE
    )
    yesterday = clock.now()
    clock.advance(86400)
    await spender.spend(cast.bob, 79)
    await spender.spend(cast.bob, 10, at=yesterday)
    assert await spender.alerts_sent() == []
    await spender.spend(cast.bob, 70, at=yesterday)
    assert await spender.alerts_sent() == [("2026-11-21", 80)]


async def test_money_in_another_currency_does_not_count(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 10, currency="CHF")
    await spender.spend(cast.bob, 100)
    await spender.budgets.sweep()
    assert await spender.alerts_sent() == []


async def test_a_sweep_tells_of_a_budget_that_was_lowered_and_nobody_settles(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 1000)
    await spender.spend(cast.bob, 500)
    await spender.budgets.sweep()
    assert await spender.alerts_sent() == []
    await set_budget(database, clock, cast.bob, 600)
    await spender.budgets.sweep()
    assert await spender.alerts_sent() == [("2026-11", 80)]
    await spender.spend(cast.bob, 1)
    clock.advance(SWEEP_INTERVAL_S)
    await spender.budgets.sweep()
    assert await spender.alerts_sent() == [("2026-11", 80)]


async def test_a_sweep_looks_once_an_hour_while_nothing_changes(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 1000)

    async def checks() -> bool:
        with record_statements() as statements:
            await spender.budgets.sweep()
        return any("FROM usage_rollups" in statement for statement in statements)

    told = []
    for wait_s in (1000, 0, SWEEP_INTERVAL_S - 1, 1, 0):
        clock.advance(wait_s)
        told.append(await checks())
    await set_budget(database, clock, cast.bob, 2000)
    assert [*told, await checks(), await checks()] == [True, False, False, True, False, True, False]


async def test_a_sweep_and_a_settlement_that_tell_the_same_do_not_wait_for_each_other(
    database: Database, database_url: str, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    for person in (cast.bob, cast.charlie):
        await spender.spend(person, 90)
        await set_budget(database, clock, person, 100)
    async with database.reading() as connection:
        first, last = await connection.run_sync(spender.budgets._due_alerts, clock.now().date())
    async with database.writing() as connection:
        await counters.lock(connection, counters.POSTING)  # as whoever settles
        await connection.run_sync(spender.budgets._enqueue, [last])
        sweeping = asyncio.create_task(spender.budgets.sweep())
        await poll_until(lambda: database.kind == "sqlite" or _somebody_waits(database_url))
        await connection.run_sync(spender.budgets._enqueue, [first])
    await sweeping
    assert await spender.alerts_sent() == [("2026-11", 80)] * 2


def _somebody_waits(url: str) -> bool:
    """Return whether a transaction waits for another one."""
    with psycopg.connect(url) as connection:
        return connection.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone() is not None


async def test_a_webhook_that_is_new_hears_how_it_stands(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 10)
    await spender.spend(cast.bob, 9)
    await spender.budgets.sweep()
    late, _ = await spender.alerts.webhooks.create(
        kind="email", target="ops@example.com", tenant_id=cast.bob.tenant.id, access=WHOLE_APPLIANCE
    )
    await spender.budgets.sweep()
    told = [message.webhook_id for message in await spender.alerts.messages()]
    assert told.count(late.id) == 1
    assert len(told) == 2


async def test_an_alert_is_rolled_back_with_its_settlement_and_told_with_the_second_try(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    failing = FailingDatabase.around(database)
    await set_budget(database, clock, cast.bob, 10)
    async with running_spender(await listening(database, clock), cast.epoch_id, database=failing) as spender:
        await spender.spend(cast.bob, 1)
        request_id = await spender.admit(cast.bob)
        failing.fail_before_commit = 1
        await spender.settle(request_id, 8)
        assert failing.fail_before_commit == 0
    assert await spender.alerts_sent() == [("2026-11", 80)]


async def test_most_settlements_cost_no_query_of_their_own(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 1_000_000)
    for person in (cast.bob, cast.charlie):
        await spender.spend(person, 1)
    with record_statements() as statements:
        for person in (cast.bob, cast.charlie):
            for _ in range(5):
                await spender.spend(person, 1)
        await spender.refuse(cast.bob)
        own = [statement for statement in statements if "FROM usage_rollups" in statement or "FROM tenants" in statement]
        assert not own
        await set_budget(database, clock, cast.bob, 2_000_000)
        await spender.spend(cast.bob, 1)
    assert [statement for statement in statements if "FROM tenants" in statement], "such queries are seen"


async def test_a_correction_that_takes_away_never_hides_a_later_crossing(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 100)
    await spender.spend(cast.bob, 50)
    await settle_directly(spender, cast.bob, [-20 * 10**12])
    await spender.spend(cast.bob, 49)
    assert await spender.alerts_sent() == []
    await spender.spend(cast.bob, 1)
    assert await spender.alerts_sent() == [("2026-11", 80)]


async def test_a_correction_that_gives_back_tells_of_nothing(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await spender.spend(cast.bob, 50)
    await set_budget(database, clock, cast.bob, 40)
    await settle_directly(spender, cast.bob, [-5 * 10**12])
    assert await spender.alerts_sent() == []


async def test_of_a_month_of_which_the_alerts_may_be_forgotten_nothing_is_told_again(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 10)
    began = clock.now()
    await spender.spend(cast.bob, 9)
    for message in await spender.alerts.outbox.claim(1):
        await spender.alerts.outbox.mark_delivered(message)
    clock.advance((KEEP_DAYS_MIN + 1) * 86400)
    assert await OutboxPruner(database, clock, keep_days=1).prune() == 1
    await spender.spend(cast.bob, 1, at=began)
    assert await spender.alerts_sent() == []


async def settle_directly(spender: Spender, person: Person, costs: Sequence[int]) -> None:
    """Settle corrections with these costs as whoever writes them does: sums first, then the alerts, in one transaction."""
    events = [adjustment(person, cost_picos=cost, at=spender.alerts.clock.now()) for cost in costs]
    async with spender.alerts.db.writing() as connection:
        await connection.run_sync(rollups.add, BillingCalendar(), events)
        await connection.run_sync(spender.budgets.on_settled, events)


TODAY = Period("tokens_per_day", START.date())


def tracker_of_tokens(headroom: int | None = None) -> ThresholdTracker:
    """Return the tracker of a limit of 100 tokens a day that alerts at 80, with `headroom` (None: unknown) today."""
    owner = Owner("model", ALL_TENANTS, "demo")
    rule = AlertRule(owner=owner, owner_fields={}, currency="EUR", limits={"tokens_per_day": 100}, percents=(80,))
    return ThresholdTracker(rule, headroom={} if headroom is None else {TODAY: headroom})


def used(tracker: ThresholdTracker, person: Person, tokens: int) -> object | None:
    """Add tokens used today; return the check that they make due, or None."""
    checks = list(tracker.add_usage(settled_event(person, completion_tokens=tokens), START.date()))
    return tracker.pending_checks[TODAY] if checks else None


def test_a_period_that_must_be_looked_at_is_unknown_until_the_look_is_durable(cast: Cast) -> None:
    """A COMMIT that failed to whoever sent it may have happened: what it counted is in no memory."""
    tracker = tracker_of_tokens(5)
    assert [used(tracker, cast.bob, tokens) is not None for tokens in (1, 5, 1)] == [False, True, True]
    assert tracker.headroom == {}


def test_transactions_that_end_in_another_order_than_they_looked_put_no_threshold_off(cast: Cast) -> None:
    tracker = tracker_of_tokens()
    first, second = used(tracker, cast.bob, 20), used(tracker, cast.bob, 50)
    tracker.store_check(TODAY, 70, second)
    tracker.store_check(TODAY, 20, first)
    assert tracker.headroom == {TODAY: 10}


def test_what_a_look_has_not_seen_is_counted_although_its_transaction_ends_behind_a_later_look(cast: Cast) -> None:
    tracker = tracker_of_tokens()
    first, second = used(tracker, cast.bob, 50), used(tracker, cast.bob, 20)
    tracker.store_check(TODAY, 50, first)
    third = used(tracker, cast.bob, 15)
    assert third is not None, "85 are used, and nobody has seen more than 70 of them"
    tracker.store_check(TODAY, 70, second)
    tracker.store_check(TODAY, 85, third)
    assert tracker.headroom == {TODAY: None}


@pytest.mark.parametrize("headroom", [5, None])
def test_what_is_given_back_puts_no_threshold_off_because_it_may_be_rolled_back(cast: Cast, headroom: int | None) -> None:
    tracker = tracker_of_tokens(headroom)
    before = dict(tracker.headroom)
    assert [used(tracker, cast.bob, tokens) for tokens in (-20, 0)] == [None, None]
    assert tracker.headroom == before


def test_more_periods_than_may_be_remembered_are_looked_at_again(
    cast: Cast,
) -> None:
    tracker = tracker_of_tokens()
    for number in range(PERIODS_MAX):
        period = Period("tokens_per_day", START.date() + timedelta(days=number))
        tracker.pending_checks[period] = check = object()
        tracker.store_check(period, 30, check)
    assert len(tracker.headroom) == PERIODS_MAX
    assert used(tracker, cast.bob, 1) is None
    period = Period("tokens_per_day", START.date() - timedelta(days=1))
    tracker.pending_checks[period] = check = object()
    tracker.store_check(period, 70, check)
    assert tracker.headroom == {period: 10}
    assert used(tracker, cast.bob, 1) is not None
