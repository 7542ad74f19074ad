"""After a crash, the next start alerts once for thresholds reached by requests of the dead process, also for a past month."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from typing import cast as typed

import pytest

from appliance.base.db import Database
from appliance.base.journal import Journal
from appliance.metering.alerts.budgets import BudgetAlerts
from appliance.metering.alerts.key_expiry import KeyExpiryAlerts
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.ledger.journal_records import replay
from appliance.metering.ledger.records import Usage
from appliance.metering.ledger.recovery import recover
from appliance.metering.prices import Price
from appliance.serving.alerting.watch import AlertWatch
from appliance.tenancy.keys import Keys
from appliance.tenancy.model_policies import ModelPolicies
from appliance.tenancy.principals import KeyChanges, Limits
from appliance.tenancy.tenants import Tenants
from tests.support.alerts import TARGET, AlertParts, alert_parts
from tests.support.cast import OWNER, PEPPER, Cast, change_tenant
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted
from tests.support.ledgers import euro_budget_alerts, euro_prices, kill_ledger, running_ledger, settle, utc_ledger
from tests.support.polling import poll_until

CALENDAR = BillingCalendar("Europe/Berlin")
MONTH_S = 31 * 86400.0


@pytest.fixture
async def alerts(database: Database, clock: FakeClock, cast: Cast) -> AlertParts:
    """Bob's budget is 100 EUR a month, and a webhook receives alerts at 80 and 100 percent of it."""
    parts = alert_parts(database, clock)
    await parts.webhooks.create(kind="webhook", target=TARGET, tenant_id=cast.bob.tenant.id, access=OWNER)
    await change_tenant(Tenants(database, clock), cast.bob, limits={"monthly_budget": 100_000_000})
    return parts


@pytest.fixture
async def price(database: Database, clock: FakeClock) -> Price:
    """One EUR for each token of output."""
    return await euro_prices(database, clock).add(
        model="demo", currency="EUR", prompt=0, cached_prompt=0, completion=1_000_000_000_000
    )


async def start_again(alerts: AlertParts, journal: Path) -> BudgetAlerts:
    """Begin an epoch as the appliance does, with alerts that have nothing in memory."""
    budgets = euro_budget_alerts(alerts.db, alerts.clock, CALENDAR)
    opened = Journal(journal)
    await replay(alerts.db, opened, alerts.clock, CALENDAR, budgets.on_settled)
    await opened.close()
    epoch_id = await begin_epoch(alerts.db, alerts.clock, "next")
    await recover(alerts.db, alerts.clock, epoch_id, calendar=CALENDAR, on_settled=budgets.on_settled)
    return budgets


async def months_and_percents(alerts: AlertParts) -> list[tuple[str, int]]:
    return [(data["month"], data["percent"]) for data in (message.payload["data"] for message in await alerts.messages())]


@pytest.mark.parametrize("later_s", [0.0, MONTH_S], ids=["at once", "a month later"])
async def test_the_next_start_alerts_for_settlements_that_were_only_in_the_journal(
    alerts: AlertParts, price: Price, clock: FakeClock, cast: Cast, tmp_path: Path, later_s: float
) -> None:
    journal = Journal(tmp_path / "j")
    ledger = utc_ledger(alerts.db, clock, cast.epoch_id, calendar=CALENDAR, journal=journal)
    await ledger.start()
    entry = pending(cast.bob, price=price, admitted_at=clock.now())
    await ledger.open(entry)
    await ledger.settle(posted(entry.request_id, completion=85))
    await kill_ledger(ledger)
    await journal.close()
    assert await months_and_percents(alerts) == []

    clock.advance(later_s)
    await start_again(alerts, tmp_path / "j")

    assert await months_and_percents(alerts) == [("2026-11", 80)]


@pytest.mark.parametrize("later_s", [0.0, MONTH_S], ids=["at once", "a month later"])
async def test_the_next_start_alerts_once_for_requests_recovered_from_a_checkpoint(
    alerts: AlertParts, price: Price, clock: FakeClock, cast: Cast, tmp_path: Path, later_s: float
) -> None:
    ledger = utc_ledger(alerts.db, clock, cast.epoch_id, calendar=CALENDAR, checkpoint_interval_s=0.0)
    await ledger.start()
    entry = pending(cast.bob, price=price, admitted_at=clock.now())
    await ledger.open(entry)
    ledger.checkpoint({entry.request_id: Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=100)})
    await poll_until(lambda: not ledger._queue._checkpoints)
    await ledger.stop()
    assert await months_and_percents(alerts) == []

    clock.advance(later_s)
    budgets = await start_again(alerts, tmp_path / "j")

    both = [("2026-11", 80), ("2026-11", 100)]
    assert await months_and_percents(alerts) == both
    models = typed("Any", SimpleNamespace(list=list[Any]))
    watch = AlertWatch(alerts.db, clock, budgets, KeyExpiryAlerts(alerts.db, clock), models, typed("Any", None))
    await watch.check()
    await (await start_again(alerts, tmp_path / "j")).sweep()
    assert await months_and_percents(alerts) == both


async def test_the_next_start_also_alerts_for_budgets_of_keys_and_limits_of_models(
    alerts: AlertParts, price: Price, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    """One request was settled in the journal alone, of the other there is a checkpoint."""
    await alerts.webhooks.create(kind="webhook", target=TARGET, access=OWNER)
    of_key = KeyChanges(limits=Limits(monthly_budget=50_000_000))
    await Keys(alerts.db, clock, PEPPER).update(cast.bob.key.id, of_key, access=OWNER)
    await ModelPolicies(alerts.db, clock).put("demo", Limits(tokens_per_day=100))
    journal = Journal(tmp_path / "j")
    ledger = utc_ledger(alerts.db, clock, cast.epoch_id, calendar=CALENDAR, journal=journal, checkpoint_interval_s=0.0)
    await ledger.start()
    settled, running = (pending(cast.bob, price=price, admitted_at=clock.now()) for _ in range(2))
    for entry in (settled, running):
        await ledger.open(entry)
    ledger.checkpoint({running.request_id: Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=60)})
    await poll_until(lambda: not ledger._queue._checkpoints and not ledger._in_round)
    await ledger.settle(posted(settled.request_id, prompt=0, completion=40))
    await kill_ledger(ledger)
    await journal.close()

    await start_again(alerts, tmp_path / "j")

    data = [message.payload["data"] for message in await alerts.messages()]
    sent = sorted((each["scope"], each["percent"]) for each in data)
    num_webhooks = {"tenant": 2, "key": 2, "model": 1}
    assert sent == sorted(
        (scope, percent) for scope, count in num_webhooks.items() for percent in (80, 100) for _ in range(count)
    )


async def test_settlements_after_the_next_start_add_to_recovered_usage(
    alerts: AlertParts, price: Price, clock: FakeClock, cast: Cast, tmp_path: Path
) -> None:
    async with running_ledger(alerts.db, clock, cast.epoch_id) as ledger:
        left_open, later = (pending(cast.bob, price=price, admitted_at=clock.now()) for _ in range(2))
        await ledger.open(left_open)
        ledger.checkpoint({left_open.request_id: Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=79)})
        await poll_until(lambda: not ledger._queue._checkpoints)
    budgets = await start_again(alerts, tmp_path / "j")
    assert await months_and_percents(alerts) == []
    epoch_id = await begin_epoch(alerts.db, clock, "later")
    ledger = utc_ledger(alerts.db, clock, epoch_id, calendar=CALENDAR, on_settled=budgets.on_settled)
    await ledger.start()
    await ledger.open(later)
    await settle(ledger, posted(later.request_id, completion=1))
    await ledger.stop()
    assert await months_and_percents(alerts) == [("2026-11", 80)]
