"""Pages of the ledger: ordered and complete, filtered, and limited to what the reader may see."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from appliance.base.acting import SYSTEM
from appliance.base.db import Database
from appliance.base.errors import InvalidValue, NotFound
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.corrections import Correction
from appliance.metering.past_requests import PastRequests
from appliance.metering.usage import LedgerFilter, UsageReports
from appliance.tenancy.access import Access
from appliance.tenancy.roles import Role, TenantRole
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending, posted, voided
from tests.support.ledgers import euro_prices, running_ledger, settle, utc_corrections
from tests.support.sql_statements import record_statements


async def test_the_ledger_pages_in_order_and_shows_each_tenant_its_own(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    reports = UsageReports(database, calendar=BillingCalendar())
    entries = [pending(cast.bob if n % 3 else cast.charlie) for n in range(10)]
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for entry in entries:
            await ledger.open(entry)
            await ledger.settle(posted(entry.request_id))
    seen: list[str] = []
    cursor = None
    while True:
        page = await reports.ledger_page(3, cursor, access=OWNER)
        seen += [event.request_id for event in page.data]
        cursor = page.next_cursor
        assert page.has_more == (cursor is not None)
        if cursor is None:
            break
    assert seen == [entry.request_id for entry in entries]
    newest = await reports.ledger_page(4, None, newest_first=True, access=OWNER)
    assert [event.request_id for event in newest.data] == [entry.request_id for entry in reversed(entries)][:4]
    bobs = await reports.ledger_page(50, None, LedgerFilter(tenant_id=cast.bob.tenant.id), access=OWNER)
    assert [event.request_id for event in bobs.data] == [e.request_id for n, e in enumerate(entries) if n % 3]
    bob = Access(role=Role.MEMBER, actor=SYSTEM, tenants={cast.bob.tenant.id: TenantRole.VIEWER})
    with pytest.raises(NotFound) as refused:
        await reports.event(entries[0].request_id, access=bob)
    assert refused.value.param == "request_id"
    with pytest.raises(NotFound):
        await PastRequests(database).get(entries[0].request_id, access=bob)


async def test_a_page_of_the_ledger_shows_only_what_the_filters_select(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    reports, bob, charlie = UsageReports(database, calendar=BillingCalendar()), cast.bob, cast.charlie
    later = clock.now() + timedelta(hours=1)
    entries = [pending(bob), pending(charlie), pending(bob, model="large"), pending(bob, admitted_at=later)]
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for entry in entries:
            await ledger.open(entry)
        for entry in entries[1:]:
            await ledger.settle(posted(entry.request_id) if entry.model == "demo" else voided(entry.request_id))
        charlies = await reports.event(entries[1].request_id, access=OWNER)
        await utc_corrections(database, clock).add(charlies.id, Correction(prompt_tokens=-1, note="too much"))
        cases: list[tuple[dict[str, Any], list[int]]] = [
            ({}, [0, 1, 2, 3, 1]),
            ({"tenant_id": charlie.tenant.id}, [1, 1]),
            ({"key_id": bob.key.id}, [0, 2, 3]),
            ({"model": "large"}, [2]),
            ({"status": "pending"}, [0]),
            ({"status": "voided", "key_id": bob.key.id}, [2]),
            ({"kind": "adjustment"}, [1]),
            ({"kind": "usage", "tenant_id": charlie.tenant.id}, [1]),
            ({"request_id": entries[1].request_id}, [1, 1]),
            ({"start": later}, [3]),
            ({"end": later}, [0, 1, 2, 1]),
        ]
        for filters, shown in cases:
            page = await reports.ledger_page(filters=LedgerFilter(**filters), access=OWNER)
            assert [event.request_id for event in page.data] == [entries[number].request_id for number in shown], filters
            newest = await reports.ledger_page(2, filters=LedgerFilter(**filters), newest_first=True, access=OWNER)
            assert newest.data == page.data[::-1][:2]
            if newest.next_cursor is not None:
                older = await reports.ledger_page(
                    50, newest.next_cursor, LedgerFilter(**filters), newest_first=True, access=OWNER
                )
                assert older.data == page.data[::-1][2:]
                with pytest.raises(InvalidValue, match="cursor"):
                    await reports.ledger_page(50, newest.next_cursor, LedgerFilter(**filters), access=OWNER)
        await ledger.settle(voided(entries[0].request_id))
    for field, value in (("status", "open"), ("kind", "refund")):
        with pytest.raises(InvalidValue) as refused:
            await reports.ledger_page(filters=LedgerFilter(**{field: value}), access=OWNER)  # type: ignore[arg-type]
        assert refused.value.param == field


async def test_corrections_of_an_event_are_summed_for_those_who_may_see_it(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    reports, corrections = UsageReports(database, calendar=BillingCalendar()), utc_corrections(database, clock)
    price = await euro_prices(database, clock).add(model="demo", currency="EUR", prompt=3, cached_prompt=1, completion=7)
    entries = [pending(cast.bob, price=price) for _ in range(2)]
    async with running_ledger(database, clock, cast.epoch_id) as ledger:
        for entry in entries:
            await ledger.open(entry)
        corrected, other = [await settle(ledger, posted(entry.request_id)) for entry in entries]
    for prompt, completion in ((-2, 0), (0, -1), (1, 0)):
        await corrections.add(corrected.id, Correction(note="ours", prompt_tokens=prompt, completion_tokens=completion))
    await corrections.add(other.id, Correction(note="another's", prompt_tokens=-5))
    bob, charlie = (
        Access(role=Role.MEMBER, actor=SYSTEM, tenants={person.tenant.id: TenantRole.VIEWER})
        for person in (cast.bob, cast.charlie)
    )
    for access in (OWNER, bob):
        assert await reports.correction_totals(corrected, access=access) == (3, -2 * 3 - 7 + 3)
        assert await reports.correction_totals(other, access=access) == (1, -5 * 3)
    assert await reports.correction_totals(corrected, access=charlie) == (0, 0)


@pytest.mark.parametrize("newest_first", [False, True])
async def test_a_page_of_the_ledger_reads_only_its_rows_in_order(
    database: Database, clock: FakeClock, cast: Cast, newest_first: bool
) -> None:
    with record_statements() as statements:
        await UsageReports(database, calendar=BillingCalendar()).ledger_page(3, newest_first=newest_first, access=OWNER)
    (statement,) = [statement for statement in statements if "FROM usage_events" in statement]
    assert statement.count("LIMIT") == 1
    assert statement.count("ORDER BY") == 2, "a join keeps no order by itself"
