"""Totals and limit levels on pages: days and months of the billing time zone, and only what the reader may see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from appliance.base.acting import SYSTEM
from appliance.base.ids import new_id
from appliance.console.limits import key_levels, tenant_levels
from appliance.console.totals import UsageTotals, costs_this_month, totals_this_month, totals_today
from appliance.tenancy.access import Access
from appliance.tenancy.principals import Limits, Principal, TenantChanges
from appliance.tenancy.roles import Role, TenantRole
from tests.support.cast import OWNER
from tests.support.clock import FakeClock
from tests.support.console_fixtures import ConsoleApp, open_console
from tests.support.factories import admission_request, pending, posted
from tests.support.ledgers import num_running, num_waiting
from tests.support.polling import poll_until

LAST_OF_MONTH = datetime(2026, 12, 31, 12, 0, tzinfo=UTC)
UNTIL_NEW_YEAR_S = 11.5 * 3600  # half past midnight of January 1 in Zurich


@pytest.fixture
async def new_year(migrated_sqlite_file: Path, tmp_path: Path) -> AsyncIterator[tuple[ConsoleApp, FakeClock]]:
    """A console of the time zone Europe/Zurich at noon UTC of December 31, and its clock."""
    clock = FakeClock(LAST_OF_MONTH)
    async with open_console(migrated_sqlite_file, tmp_path, clock, time_zone="Europe/Zurich") as console:
        await console.services.prices.add(model="demo", currency="EUR", prompt=1_000_000, cached_prompt=0, completion=0)
        yield console, clock


async def bill_usage(console: ConsoleApp, clock: FakeClock, tokens: int, currency: str | None = None) -> None:
    price = await console.services.prices.current("demo", clock.now(), currency=currency)
    entry = pending(console.cast.bob, request_id=new_id("req"), admitted_at=clock.now(), price=price)
    await console.services.ledger.open(entry)
    await console.services.ledger.settle(posted(entry.request_id, prompt=tokens, completion=0))


async def test_the_list_of_tenants_shows_the_cost_of_each_this_month(new_year: tuple[ConsoleApp, FakeClock]) -> None:
    console, clock = new_year
    await bill_usage(console, clock, 5_000)
    clock.advance(UNTIL_NEW_YEAR_S)
    await bill_usage(console, clock, 2_500_000)
    seen = Access(actor=SYSTEM, role=Role.MEMBER, tenants={console.cast.charlie.tenant.id: TenantRole.VIEWER})
    ids = [console.cast.bob.tenant.id, console.cast.charlie.tenant.id]

    costs = await costs_this_month(console.services, ids, access=OWNER)
    page = (await (await console.alice()).get("/tenants")).text

    assert {tenant: [(row.cost_picos, row.currency) for row in rows] for tenant, rows in costs.items()} == {
        ids[0]: [(2_500_000_000_000, "EUR")]
    }
    assert await costs_this_month(console.services, ids, access=seen) == {}
    assert page.count('data-label="This month" class="num unfolds whole">2.50 EUR</td>') == 1
    assert page.count('data-label="This month" class="num unfolds whole">–</td>') == page.count('data-label="This month"') - 1


async def test_day_and_month_begin_at_midnight_of_the_billing_zone(new_year: tuple[ConsoleApp, FakeClock]) -> None:
    console, clock = new_year
    await bill_usage(console, clock, 1000)
    clock.advance(UNTIL_NEW_YEAR_S)
    await bill_usage(console, clock, 7)

    bob = console.cast.bob.tenant.id
    for totals in (
        await totals_today(console.services, access=OWNER),
        await totals_today(console.services, bob, access=OWNER),
        await totals_this_month(console.services, bob, access=OWNER),
    ):
        assert (totals.requests, totals.tokens, totals.cost_picos) == (1, 7, 7_000_000)


async def test_a_tenant_s_page_shows_costs_in_its_billing_currency(
    new_year: tuple[ConsoleApp, FakeClock],
) -> None:
    console, clock = new_year
    await console.services.prices.add(model="demo", currency="CHF", prompt=2_000_000, cached_prompt=0, completion=0)
    bob = console.cast.bob.tenant.id
    await console.services.tenants.update(bob, TenantChanges(currency="CHF"), access=OWNER)
    alice = await console.alice()

    before = (await alice.get(f"/tenants/{bob}")).text
    await bill_usage(console, clock, 1_250_000, "CHF")
    after = (await alice.get(f"/tenants/{bob}")).text

    for page, amount in ((before, "0.000000"), (after, "2.50")):
        for period in ("today", "this month"):
            assert f'<dt>Cost {period}, CHF</dt><dd class="money">{amount}</dd>' in page


async def test_totals_cover_only_what_the_reader_may_see(new_year: tuple[ConsoleApp, FakeClock]) -> None:
    console, clock = new_year
    await bill_usage(console, clock, 7)
    bob, charlie = console.cast.bob.tenant.id, console.cast.charlie.tenant.id
    stranger = Access(role=Role.MEMBER, actor=SYSTEM, tenants={charlie: TenantRole.MANAGER})

    for totals in (
        await totals_today(console.services, access=stranger),
        await totals_today(console.services, bob, access=stranger),
        await totals_this_month(console.services, bob, access=stranger),
    ):
        assert totals == UsageTotals()


async def test_limit_levels_cover_only_what_the_reader_may_see(new_year: tuple[ConsoleApp, FakeClock]) -> None:
    console, clock = new_year
    await bill_usage(console, clock, 7)
    bob, limits = console.cast.bob, Limits(tokens_per_day=100)
    tenant, key = replace(bob.tenant, limits=limits), replace(bob.key, limits=limits)
    stranger = Access(role=Role.MEMBER, actor=SYSTEM, tenants={console.cast.charlie.tenant.id: TenantRole.MANAGER})

    for access, text in ((OWNER, "7 of 100"), (stranger, "0 of 100")):
        levels = [
            await tenant_levels(console.services, tenant, access=access),
            await key_levels(console.services, tenant, key, access=access),
        ]
        assert [level.text for found in levels for level in found] == [text, text]


async def test_limit_levels_refer_to_the_current_limits_not_to_those_of_the_last_request(
    new_year: tuple[ConsoleApp, FakeClock],
) -> None:
    console, _clock = new_year
    old, new = Limits(tokens_per_minute=100), Limits(tokens_per_minute=200, requests_per_minute=5, concurrent_requests=9)
    bob = Principal(tenant=replace(console.cast.bob.tenant, limits=old), key=replace(console.cast.bob.key, limits=old))
    held = await console.services.admission.admit(admission_request(bob, 30))
    shown = [
        await tenant_levels(console.services, replace(bob.tenant, limits=new), access=OWNER),
        await key_levels(console.services, bob.tenant, replace(bob.key, limits=new), access=OWNER),
    ]
    assert [[level.text for level in levels] for levels in shown] == [["30 of 200", "0 of 5", "1 of 9"]] * 2
    held.void()


async def test_reading_limit_levels_admits_no_waiting_request(new_year: tuple[ConsoleApp, FakeClock]) -> None:
    console, _clock = new_year
    limits = Limits(concurrent_requests=1)
    bob = Principal(tenant=replace(console.cast.bob.tenant, limits=limits), key=replace(console.cast.bob.key, limits=limits))
    admission = console.services.admission
    first = await admission.admit(admission_request(bob, 1))
    waiting = [asyncio.create_task(admission.admit(admission_request(bob, 1), 60.0)) for _ in range(5)]
    await poll_until(lambda: num_waiting(admission) == 5)
    await tenant_levels(console.services, bob.tenant, access=OWNER)
    await key_levels(console.services, bob.tenant, bob.key, access=OWNER)
    first.settle(1)
    await poll_until(waiting[0].done)
    assert (num_waiting(admission), num_running(admission, bob.tenant.id), num_running(admission, bob.key.id)) == (4, 1, 1)
    for each in waiting:
        each.cancel()
    await asyncio.wait(waiting)


async def test_an_exact_time_is_shown_in_utc_and_in_the_billing_zone(new_year: tuple[ConsoleApp, FakeClock]) -> None:
    console, clock = new_year
    clock.advance(UNTIL_NEW_YEAR_S)
    key, _ = await console.services.keys.create(console.cast.bob.tenant.id, name="new year", access=OWNER)
    page = (await (await console.alice()).get(f"/keys/{key.id}")).text.replace("\N{NO-BREAK SPACE}", " ")
    assert "2026-12-31 23:30:00 UTC (2027-01-01 00:30:00 Europe/Zurich)" in page
