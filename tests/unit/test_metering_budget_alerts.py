"""Budget alerts: enqueued with the settlement, once per threshold, period and budget, and again for a changed budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from appliance.base import counters
from appliance.base.db import Database
from appliance.metering.alerts.budgets import PERIODS_MAX, SWEEP_INTERVAL_S, ThresholdTracker
from appliance.metering.alerts.outbox_pruning import KEEP_DAYS_MIN, OutboxPruner
from appliance.metering.alerts.rules import AlertRule, Period
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.limits.owners import ALL_TENANTS, Owner
from appliance.tenancy.principals import Limits
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, AlertParts, alert_parts
from tests.support.cast import OWNER, Cast, Person, change_tenant
from tests.support.clock import START, FakeClock
from tests.support.databases import transaction_is_blocked
from tests.support.factories import adjustment, settled_event
from tests.support.ledgers import FailingDatabase
from tests.support.polling import poll_until
from tests.support.spending import UNIT, Spender, alert_period_and_percent, running_spender, set_budget
from tests.support.sql_statements import record_statements


@pytest.fixture
async def spender(database: Database, clock: FakeClock, cast: Cast) -> AsyncIterator[Spender]:
    """A running ledger, and one webhook of the appliance that receives every alert."""
    async with running_spender(await alerts_with_webhook(database, clock), cast.epoch_id) as spender:
        yield spender


async def alerts_with_webhook(database: Database, clock: FakeClock) -> AlertParts:
    """Return alerts with one webhook of the appliance that receives all of them."""
    alerts = alert_parts(database, clock)
    await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    return alerts


async def test_each_threshold_alerts_once_when_it_is_reached(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 100)
    for units, num_alerts in ((79, 0), (1, 1), (10, 1), (9, 1), (1, 2), (50, 2)):
        await spender.spend(cast.bob, units)
        assert len(await spender.alerts_sent()) == num_alerts
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


async def test_two_thresholds_reached_by_one_request_both_alert(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 10)
    await spender.spend(cast.bob, 25)
    assert sorted(await spender.alerts_sent()) == [("2026-11", 80), ("2026-11", 100)]


async def test_the_percentages_are_those_of_the_tenant_and_an_empty_list_disables_alerts(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 3, alert_percents=[33, 34])
    await set_budget(database, clock, cast.charlie, 3, alert_percents=[])
    await spender.spend(cast.bob, 1)
    assert await spender.alerts_sent() == [("2026-11", 33)]  # a third is more than 33 % and less than 34 %
    await spender.spend(cast.bob, 1)
    await spender.spend(cast.charlie, 5)
    assert sorted(await spender.alerts_sent()) == [("2026-11", 33), ("2026-11", 34)]


async def test_a_tenant_with_no_budget_or_a_budget_of_zero_has_no_alerts(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.charlie, 0)
    for person in (cast.bob, cast.charlie):
        await spender.spend(person, 1000)
    await spender.budgets.sweep()
    assert await spender.alerts_sent() == []


async def test_a_changed_budget_alerts_again_and_the_old_one_does_not_repeat(
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
    async with running_spender(await alerts_with_webhook(database, clock), cast.epoch_id, calendar=calendar) as spender:
        await spender.spend(cast.bob, 8, at=datetime(2026, 11, 30, 10, 59, tzinfo=UTC))
        await spender.spend(cast.bob, 8, at=datetime(2026, 11, 30, 11, 0, tzinfo=UTC))  # midnight there
    assert await spender.alerts_sent() == [("2026-11", 80), ("2026-12", 80)]


async def test_tokens_per_day_have_alerts_too(database: Database, clock: FakeClock, cast: Cast, spender: Spender) -> None:
    await change_tenant(Tenants(database, clock), cast.bob, limits=Limits(tokens_per_day=100))
    for units in (79, 1, 19, 1):
        await spender.spend(cast.bob, units)
    clock.advance(86400)
    await spender.spend(cast.bob, 80)
    assert await spender.alerts_sent() == [("2026-11-21", 80), ("2026-11-21", 100), ("2026-11-22", 80)]
    message = (await spender.alerts.messages())[0]
    assert message.event == "tokens_per_day.threshold"
    assert (message.payload["data"]["tokens"], message.payload["data"]["tokens_per_day"]) == (80, 100)


async def test_tokens_of_a_later_day_do_not_count_for_an_earlier_day_that_settles_late(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await change_tenant(Tenants(database, clock), cast.bob, limits=Limits(tokens_per_day=100))
    yesterday = clock.now()
    clock.advance(86400)
    await spender.spend(cast.bob, 79)
    await spender.spend(cast.bob, 10, at=yesterday)
    assert await spender.alerts_sent() == []
    await spender.spend(cast.bob, 70, at=yesterday)
    assert await spender.alerts_sent() == [("2026-11-21", 80)]


async def test_costs_in_another_currency_do_not_count(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 10, currency="CHF")
    await spender.spend(cast.bob, 100)
    await spender.budgets.sweep()
    assert await spender.alerts_sent() == []


async def test_a_sweep_alerts_for_a_lowered_budget_without_a_settlement(
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


async def test_a_sweep_reads_sums_once_an_hour_while_nothing_changes(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 1000)

    async def reads_sums() -> bool:
        with record_statements() as statements:
            await spender.budgets.sweep()
        return any("FROM usage_rollups" in statement for statement in statements)

    reads = []
    for wait_s in (1000, 0, SWEEP_INTERVAL_S - 1, 1, 0):
        clock.advance(wait_s)
        reads.append(await reads_sums())
    await set_budget(database, clock, cast.bob, 2000)
    assert [*reads, await reads_sums(), await reads_sums()] == [True, False, False, True, False, True, False]


async def test_a_sweep_and_a_settlement_with_the_same_alerts_do_not_deadlock(
    database: Database, database_url: str, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    for person in (cast.bob, cast.charlie):
        await spender.spend(person, 90)
        await set_budget(database, clock, person, 100)
    async with database.reading() as connection:
        first, last = await connection.run_sync(spender.budgets._due_alerts, clock.now().date())
    async with database.writing() as connection:
        await counters.lock(connection, counters.POSTING)  # as a settlement does
        await connection.run_sync(spender.budgets._enqueue, [last])
        sweeping = asyncio.create_task(spender.budgets.sweep())
        await poll_until(lambda: database.kind == "sqlite" or transaction_is_blocked(database_url))
        await connection.run_sync(spender.budgets._enqueue, [first])
    await sweeping
    assert await spender.alerts_sent() == [("2026-11", 80)] * 2


async def test_a_new_webhook_receives_the_alerts_already_due(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 10)
    await spender.spend(cast.bob, 9)
    await spender.budgets.sweep()
    late, _ = await spender.alerts.webhooks.create(
        kind="email", target="ops@example.com", tenant_id=cast.bob.tenant.id, access=OWNER
    )
    await spender.budgets.sweep()
    recipients = [message.webhook_id for message in await spender.alerts.messages()]
    assert recipients.count(late.id) == 1
    assert len(recipients) == 2


async def test_an_alert_is_rolled_back_with_its_settlement_and_sent_with_the_retry(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    failing = FailingDatabase.around(database)
    await set_budget(database, clock, cast.bob, 10)
    async with running_spender(await alerts_with_webhook(database, clock), cast.epoch_id, database=failing) as spender:
        await spender.spend(cast.bob, 1)
        request_id = await spender.admit(cast.bob)
        failing.fail_before_commit = 1
        await spender.settle(request_id, 8)
        assert failing.fail_before_commit == 0
    assert await spender.alerts_sent() == [("2026-11", 80)]


async def test_most_settlements_need_no_query_for_alerts(
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
    assert [statement for statement in statements if "FROM tenants" in statement], "the recorder sees such queries"


async def test_a_negative_correction_does_not_hide_a_later_crossing(
    database: Database, clock: FakeClock, cast: Cast, spender: Spender
) -> None:
    await set_budget(database, clock, cast.bob, 100)
    await spender.spend(cast.bob, 50)
    await settle_directly(spender, cast.bob, [-20 * 10**12])
    await spender.spend(cast.bob, 49)
    assert await spender.alerts_sent() == []
    await spender.spend(cast.bob, 1)
    assert await spender.alerts_sent() == [("2026-11", 80)]


async def test_a_negative_correction_alerts_nobody(database: Database, clock: FakeClock, cast: Cast, spender: Spender) -> None:
    await spender.spend(cast.bob, 50)
    await set_budget(database, clock, cast.bob, 40)
    await settle_directly(spender, cast.bob, [-5 * 10**12])
    assert await spender.alerts_sent() == []


async def test_a_month_whose_alerts_were_pruned_does_not_alert_again(
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
    """Settle corrections with these costs as the ledger does: sums first, then the alerts, in one transaction."""
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


def test_a_period_due_for_a_check_has_no_headroom_until_the_check_is_committed(cast: Cast) -> None:
    """A COMMIT may have happened although it raised an error: its usage is then in no memory."""
    tracker = tracker_of_tokens(5)
    assert [used(tracker, cast.bob, tokens) is not None for tokens in (1, 5, 1)] == [False, True, True]
    assert tracker.headroom == {}


def test_checks_committed_out_of_order_keep_the_newest_headroom(cast: Cast) -> None:
    tracker = tracker_of_tokens()
    first, second = used(tracker, cast.bob, 20), used(tracker, cast.bob, 50)
    tracker.store_check(TODAY, 70, second)
    tracker.store_check(TODAY, 20, first)
    assert tracker.headroom == {TODAY: 10}


def test_usage_that_no_check_has_read_counts_whatever_order_checks_commit_in(cast: Cast) -> None:
    tracker = tracker_of_tokens()
    first, second = used(tracker, cast.bob, 50), used(tracker, cast.bob, 20)
    tracker.store_check(TODAY, 50, first)
    third = used(tracker, cast.bob, 15)
    assert third is not None, "85 are used, and no check has read more than 70 of them"
    tracker.store_check(TODAY, 70, second)
    tracker.store_check(TODAY, 85, third)
    assert tracker.headroom == {TODAY: None}


@pytest.mark.parametrize("headroom", [5, None])
def test_negative_usage_adds_no_headroom_because_it_may_be_rolled_back(cast: Cast, headroom: int | None) -> None:
    tracker = tracker_of_tokens(headroom)
    before = dict(tracker.headroom)
    assert [used(tracker, cast.bob, tokens) for tokens in (-20, 0)] == [None, None]
    assert tracker.headroom == before


def test_more_periods_than_are_kept_in_memory_are_checked_again(
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
