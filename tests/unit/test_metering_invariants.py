"""`gatehouse db check`: a sound ledger passes, and each invariant violated by hand is found and named."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, insert, select, update

from appliance.base import migrations, tables
from appliance.base.counters import POSTING, take
from appliance.base.db import Database
from appliance.base.ids import new_id
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants import check
from appliance.metering.invariants.check import check_ledger
from appliance.metering.invoicing.free_allowances import FreeAllowances
from appliance.metering.invoicing.rows import Invoice
from appliance.metering.ledger import rollups
from appliance.metering.ledger.corrections import Correction
from appliance.metering.ledger.journal_records import JournaledEvent, encode, open_journal
from tests.support.billing import Tokens, post_event
from tests.support.cast import OWNER, Cast
from tests.support.clock import FakeClock
from tests.support.factories import pending
from tests.support.ledgers import euro_invoices, utc_corrections
from tests.support.tampering import disable_triggers, tamper

INVARIANTS = (
    "tables", "once", "pending", "settled", "counts", "cost", "sums", "corrections", "postings", "rollups", "invoices", "audit",
    "requests", "price", "day", "kept",
)  # fmt: skip
PRICE = {"prompt": 1_500_000, "cached_prompt": 150_000, "completion": 6_000_000}


def on_databases(names: str, *cases: Any) -> pytest.MarkDecorator:
    """Run the cases of a test alternately on SQLite and PostgreSQL; both read what is compared by the same statement."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    values = [pytest.param("sqlite", *case) for case in rows[::2]]
    values += [pytest.param("postgresql", *case, marks=pytest.mark.postgres) for case in rows[1::2]]
    return pytest.mark.parametrize(f"database_url, {names}", values, indirect=["database_url"])


@pytest.fixture
async def ledger(database: Database, cast: Cast, clock: FakeClock) -> str:
    """One posted, one voided and one pending event of Bob's; return the id of the posted request."""
    price_id = new_id("price")
    price = {"id": price_id, "model": "demo", "effective_from": clock.now(), "currency": "EUR", "batch_percent": 100}
    shared = {
        "tenant_id": cast.bob.tenant.id,
        "key_id": cast.bob.key.id,
        "model": "demo",
        "endpoint": "/v1/chat/completions",
        "admitted_at": clock.now(),
    }
    billing_day = clock.now().date()
    event = {
        **shared,
        "epoch_id": cast.epoch_id,
        "kind": "usage",
        "reserved_tokens": 100,
        "prompt_tokens": 30,
        "cached_tokens": 16,
        "completion_tokens": 7,
        "estimated": False,
        "price_id": price_id,
        "currency": "EUR",
        "status": "posted",
        "finish_reason": "stop",
        "settled_at": clock.now(),
        "billing_day": billing_day,
        "posting": 1,
        "cost_picos": 14 * 1_500_000 + 16 * 150_000 + 7 * 6_000_000,
    }
    voided = {"status": "voided", "finish_reason": "refused", "cost_picos": 0, "posting": 2}
    voided |= dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens"), 0)
    pending = {"status": "pending", "finish_reason": None, "cost_picos": 0, "settled_at": None, "posting": None}
    request = {
        "stream": True,
        "prompt_tokens": 30,
        "cached_tokens": 16,
        "completion_tokens": 7,
        "finish_reason": "stop",
        "kv_blocks": 3,
        "preemptions": 0,
    }
    async with database.writing() as connection:
        await connection.execute(insert(tables.prices).values(**price, **PRICE, created_at=clock.now()))
        variants: list[dict[str, Any]] = [{}, voided, pending]
        for number, changes in enumerate(variants):
            await connection.execute(insert(tables.usage_events).values(**{**event, "request_id": f"req_{number}", **changes}))
        await connection.execute(insert(tables.requests).values(**shared, **request, id="req_0"))
        await take(connection, POSTING, 2)
    await rollups.rebuild(database, BillingCalendar())
    return "req_0"


async def change(database: Database, request_id: str, **values: Any) -> None:
    async with database.writing() as connection:
        events = tables.usage_events
        await disable_triggers(connection)
        await connection.execute(update(events).where(events.c.request_id == request_id).values(**values))


async def event_id_of(database: Database, request_id: str) -> int:
    events = tables.usage_events
    async with database.reading() as connection:
        query = select(events.c.id).where(events.c.request_id == request_id, events.c.kind == "usage")
        return int((await connection.execute(query)).scalar_one())


async def states(url: str, *, running: bool = True) -> dict[str, str]:
    return {finding.name: finding.state for finding in await check_ledger(url, running=running, time_zone="UTC")}


async def broken_invariants(url: str) -> set[str]:
    """The violated invariants, without those that every change by hand violates: the sums by time and the triggers."""
    return {name for name, state in (await states(url)).items() if state == "broken"} - {"rollups", "kept"}


async def test_a_sound_ledger_passes(database_url: str, ledger: str) -> None:
    found = await states(database_url)
    assert found == dict.fromkeys(INVARIANTS, "holds")


async def test_tables_of_an_older_version_are_the_only_finding(database_url: str, ledger: str) -> None:
    older = "0008"
    migrations.downgrade(database_url, older)
    try:
        (finding,) = await check_ledger(database_url, running=False, time_zone="UTC")
    finally:
        migrations.upgrade(database_url)
    assert (finding.name, finding.state, finding.text) == ("tables", "broken", migrations.schema_problem(older))


async def test_a_cost_that_is_one_pico_off_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, cost_picos=tables.usage_events.c.cost_picos + 1)
    assert await broken_invariants(database_url) == {"cost"}


async def test_a_voided_event_that_costs_something_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, "req_1", cost_picos=5)
    assert await broken_invariants(database_url) == {"cost"}


async def test_an_event_without_a_price_costs_nothing(database: Database, database_url: str, ledger: str) -> None:
    await change_price(database, model="other")
    for request in (ledger, "req_1", "req_2"):
        await change(database, request, price_id=None, cost_picos=0)
    assert await broken_invariants(database_url) == set()


async def change_price(database: Database, **values: Any) -> None:
    async with database.writing() as connection:
        await disable_triggers(connection)
        await connection.execute(update(tables.prices).values(**values))


LONG_AGO = FakeClock().now() - timedelta(days=30)


@on_databases(
    "values",
    {"model": "other"},
    {"currency": "CHF"},
    {"effective_from": FakeClock().now() + timedelta(days=1)},
    {"batch_percent": 100},
)
async def test_a_price_that_does_not_match_its_event_is_found(
    database: Database, database_url: str, ledger: str, values: dict[str, Any]
) -> None:
    await change_price(database, **values)
    assert await broken_invariants(database_url) == ({"price"} if values != {"batch_percent": 100} else set())


async def test_an_event_that_lost_its_price_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change_price(database, effective_from=LONG_AGO, created_at=LONG_AGO)
    assert await broken_invariants(database_url) == set()
    await change(database, ledger, price_id=None, cost_picos=0)
    assert await broken_invariants(database_url) == {"price"}


async def test_an_event_at_zero_percent_of_its_price_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, price_basis_points=0, cost_picos=0)
    assert await broken_invariants(database_url) == {"price"}


async def test_an_older_price_than_the_one_in_force_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change_price(database, effective_from=LONG_AGO - timedelta(days=1), created_at=LONG_AGO)
    later = {"id": "price_later", "model": "demo", "currency": "EUR", "batch_percent": 100, **PRICE}
    async with database.writing() as connection:
        await connection.execute(insert(tables.prices).values(**later, effective_from=LONG_AGO, created_at=LONG_AGO))
    assert await broken_invariants(database_url) == {"price"}


async def test_an_event_on_another_day_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, billing_day=FakeClock().now().date() + timedelta(days=1))
    assert await broken_invariants(database_url) == set()  # it is already the next day in some time zone
    await change(database, ledger, billing_day=FakeClock().now().date() + timedelta(days=2))
    assert await broken_invariants(database_url) == {"day"}


@pytest.mark.parametrize("name", ["tenant_id", "key_id"])
async def test_an_event_whose_tenant_or_key_is_not_that_of_its_request_is_found(
    database: Database, database_url: str, ledger: str, cast: Cast, name: str
) -> None:
    charlie = {"tenant_id": cast.charlie.tenant.id, "key_id": cast.charlie.key.id}
    await change(database, ledger, **{name: charlie[name]})
    assert await broken_invariants(database_url) == {"requests"}


async def test_a_request_without_an_event_is_found(database: Database, database_url: str, ledger: str) -> None:
    async with database.writing() as connection:
        await disable_triggers(connection)
        await connection.execute(delete(tables.usage_events).where(tables.usage_events.c.request_id == ledger))
    assert await broken_invariants(database_url) >= {"requests"}


async def test_a_posted_event_made_voided_is_found(database: Database, database_url: str, ledger: str) -> None:
    nothing = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "cost_picos"), 0)
    await change(database, ledger, status="voided", finish_reason="refused", **nothing)
    assert await broken_invariants(database_url) == {"counts", "requests"}


async def test_a_recovered_event_must_be_estimated_with_the_tokens_of_its_request(
    database: Database, database_url: str, ledger: str
) -> None:
    await change(database, ledger, status="recovered", estimated=True)
    assert await broken_invariants(database_url) == set()
    await change(database, ledger, estimated=False)
    assert await broken_invariants(database_url) == {"settled"}
    nothing = dict.fromkeys(("prompt_tokens", "cached_tokens", "completion_tokens", "cost_picos"), 0)
    await change(database, ledger, estimated=True, **nothing)
    assert await broken_invariants(database_url) == {"counts"}


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_dropped_triggers_are_found(database: Database, database_url: str, ledger: str) -> None:
    await tamper(database)
    assert (await states(database_url))["kept"] == "broken"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_a_single_dropped_trigger_is_found(database: Database, database_url: str, ledger: str) -> None:
    async with database.writing() as connection:
        await connection.exec_driver_sql("DROP TRIGGER usage_events_no_insert_over")
    assert (await states(database_url))["kept"] == "broken"


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_disabled_triggers_are_found(database: Database, database_url: str, ledger: str) -> None:
    await tamper(database, "ALTER TABLE prices DISABLE TRIGGER prices_no_update")
    found = await states(database_url)
    await tamper(database, "ALTER TABLE prices ENABLE TRIGGER prices_no_update")  # other tests use this database, too
    assert (found["kept"], (await states(database_url))["kept"]) == ("broken", "holds")


@on_databases("change", {"currency": "CHF"}, {"price_basis_points": 0}, {"price_id": "price_other"})
async def test_an_adjustment_with_other_terms_than_the_corrected_event_is_found(
    database: Database, database_url: str, ledger: str, change: dict[str, Any]
) -> None:
    other = {"id": "price_other", "model": "other", "currency": "EUR", "batch_percent": 100, **PRICE}
    async with database.writing() as connection:
        await connection.execute(insert(tables.prices).values(**other, effective_from=LONG_AGO, created_at=LONG_AGO))
    await adjust_by_hand(database, ledger, completion_tokens=0, cost_picos=-5, **change)
    assert await broken_invariants(database_url) == {"corrections"}


async def test_counts_that_differ_from_the_request_are_found(database: Database, database_url: str, ledger: str) -> None:
    async with database.writing() as connection:
        await connection.execute(update(tables.requests).values(completion_tokens=8))
    assert await broken_invariants(database_url) == {"counts"}


async def test_more_cached_than_prompt_tokens_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, cached_tokens=31)
    assert "counts" in await broken_invariants(database_url)


async def test_a_settled_event_without_a_settlement_time_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, ledger, settled_at=None)
    assert await broken_invariants(database_url) == {"settled"}


async def test_entries_left_in_the_journal_of_a_dead_process_are_reported(
    database: Database, database_url: str, ledger: str, cast: Cast, clock: FakeClock
) -> None:
    journal = open_journal(database_url)
    if journal is None:
        return  # PostgreSQL has none
    entry = JournaledEvent(epoch_id=cast.epoch_id, currency="EUR", billing_day=clock.now().date(), event=pending(cast.bob))
    await journal.append(encode(entry))
    found = {finding.name: finding for finding in await check_ledger(database_url, running=False, time_zone="UTC")}
    assert found["pending"].state == "note"
    assert "1 of a process that has ended, 1 more in its journal" in found["pending"].text
    assert {
        finding.text for finding in await check_ledger(database_url, running=True, time_zone="UTC") if "journal" in finding.text
    } == set()


async def test_a_pending_event_of_a_dead_process_is_found(
    database: Database, database_url: str, ledger: str, cast: Cast
) -> None:
    async with database.writing() as connection:
        later = {"id": new_id("ep"), "version": "test", "pid": 1}
        await connection.execute(insert(tables.epochs).values(**later, started_at=FakeClock().now().replace(year=2030)))
    assert await broken_invariants(database_url) == {"pending"}


async def test_after_a_kill_pending_events_are_a_note_until_the_next_start(database_url: str, ledger: str) -> None:
    assert (await states(database_url, running=False))["pending"] == "note"


async def test_an_event_whose_request_row_was_pruned_passes(database: Database, database_url: str, ledger: str) -> None:
    async with database.writing() as connection:
        await connection.execute(delete(tables.requests))
    assert await broken_invariants(database_url) == set()


async def test_a_violation_is_found_across_batch_boundaries(
    database: Database, database_url: str, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "BATCH_ROWS", 1)
    assert await broken_invariants(database_url) == set()
    await change(database, "req_1", cost_picos=5)
    assert await broken_invariants(database_url) == {"cost"}


async def test_a_long_check_reports_its_progress(
    database: Database, database_url: str, ledger: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "BATCH_ROWS", 1)
    reported: list[float] = []
    await check_ledger(database_url, running=True, time_zone="UTC", on_progress=reported.append)
    assert reported == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1.0]


@on_databases(
    "bucket, column",  # one comparison has every column, whatever the bucket
    ("minute", "requests"),
    ("minute", "cost_low"),
    ("hour", "prompt_tokens"),
    ("hour", "cost_high"),
    ("day", "rejected_tokens"),
    ("day", "cost_low"),
)
async def test_a_sum_that_is_off_by_one_is_found(
    database: Database, database_url: str, ledger: str, bucket: str, column: str
) -> None:
    sums = tables.usage_rollups
    async with database.writing() as connection:
        await connection.execute(update(sums).where(sums.c.bucket == bucket).values({column: sums.c[column] + 1}))
    findings = {finding.name: finding for finding in await check_ledger(database_url, running=True, time_zone="UTC")}
    assert findings["rollups"].state == "broken"
    assert f"by {bucket} " in findings["rollups"].text
    await rollups.rebuild(database, BillingCalendar())
    assert (await states(database_url))["rollups"] == "holds"


async def test_sums_by_day_move_to_a_time_zone_that_differs_only_in_summer(database: Database, cast: Cast) -> None:
    london = BillingCalendar("Europe/London")
    for day in (date(2026, 1, 10), date(2026, 7, 10)):
        await post_event(database, cast.bob, day, Tokens(), epoch_id=cast.epoch_id, price=None)
    await rollups.rebuild(database, BillingCalendar())
    assert await rollups.align_days(database, london)
    async with database.reading() as connection:
        assert await rollups.mismatched_levels(connection, database.kind, london) == []
    assert not await rollups.align_days(database, london)


@on_databases("bucket", "minute", "hour", "day")
async def test_a_sum_of_the_appliance_that_differs_from_the_sums_of_its_owners_is_found(
    database: Database, database_url: str, ledger: str, bucket: str
) -> None:
    sums = tables.usage_appliance_rollups
    async with database.writing() as connection:
        await connection.execute(update(sums).where(sums.c.bucket == bucket).values(cost_low=sums.c.cost_low + 1))
    findings = {finding.name: finding for finding in await check_ledger(database_url, running=True, time_zone="UTC")}
    assert findings["rollups"].state == "broken"
    assert f"by {bucket} " in findings["rollups"].text


async def test_a_sum_without_events_and_an_event_without_a_sum_are_found(
    database: Database, database_url: str, ledger: str
) -> None:
    async with database.writing() as connection:
        await connection.execute(update(tables.usage_rollups).values(model="ghost"))
    assert (await states(database_url))["rollups"] == "broken"
    async with database.writing() as connection:
        await connection.execute(delete(tables.usage_rollups))
    assert (await states(database_url))["rollups"] == "broken"


@on_databases("posting, counter", (3, 2), (3, 3), (1, 3), (1, 1), (None, 2))
async def test_a_missing_posting_or_a_counter_ahead_of_the_postings_is_found(
    database: Database, database_url: str, ledger: str, posting: int | None, counter: int
) -> None:
    await change(database, ledger, posting=posting)
    async with database.writing() as connection:
        await connection.execute(update(tables.counters).where(tables.counters.c.name == POSTING).values(value=counter))
    assert await broken_invariants(database_url) == {"postings"}


async def test_a_pending_event_with_a_posting_is_found(database: Database, database_url: str, ledger: str) -> None:
    await change(database, "req_2", posting=3)
    assert await broken_invariants(database_url) == {"postings"}


async def adjust_by_hand(database: Database, request_id: str, **changes: Any) -> None:
    """Insert an adjustment of a request without any check; by default it takes back 8 of 7 output tokens."""
    events = tables.usage_events
    async with database.writing() as connection:
        query = select(events).where(events.c.request_id == request_id, events.c.kind == "usage")
        row = dict((await connection.execute(query)).mappings().one())
        tokens = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": -8, "cost_picos": -8 * 6_000_000}
        adjustment = {"kind": "adjustment", "corrects_id": row.pop("id"), "posting": await take(connection, POSTING)}
        await connection.execute(insert(events).values(**(row | adjustment | tokens | changes)))


async def test_a_corrected_ledger_holds_every_invariant(
    database: Database, database_url: str, ledger: str, clock: FakeClock
) -> None:
    corrections, event_id = utc_corrections(database, clock), await event_id_of(database, ledger)
    await corrections.add(event_id, Correction(note="twice", completion_tokens=-7))
    await corrections.add(event_id, Correction(note="for the trouble", cost_picos=-5))
    await corrections.add(event_id, Correction(note="all that was computed", prompt_tokens=-14))
    assert await states(database_url) == dict.fromkeys(INVARIANTS, "holds")


@on_databases("refund", {}, {"completion_tokens": 0, "price_id": None, "cost_picos": -5 * 10**9})
async def test_a_correction_below_zero_is_found(
    database: Database, database_url: str, ledger: str, refund: dict[str, Any]
) -> None:
    await adjust_by_hand(database, ledger, **refund)
    assert await broken_invariants(database_url) == {"corrections"}


@on_databases("corrects", "req_1", "req_2", None)
async def test_an_adjustment_of_an_unsettled_or_missing_event_is_found(
    database: Database, database_url: str, ledger: str, corrects: str | None
) -> None:
    corrects_id = None if corrects is None else await event_id_of(database, corrects)
    await adjust_by_hand(database, ledger, corrects_id=corrects_id)
    assert await broken_invariants(database_url) == {"corrections"}


async def close_month(database: Database, clock: FakeClock, cast: Cast) -> Invoice:
    month = f"{clock.now():%Y-%m}"
    clock.advance(40 * 86400)
    invoices = euro_invoices(database, clock, BillingCalendar())
    return await invoices.close((await invoices.draft(cast.bob.tenant.id, month, access=OWNER)).head.id, access=OWNER)


async def test_a_late_correction_passes_and_a_missing_invoice_number_is_found(
    database: Database, database_url: str, ledger: str, clock: FakeClock, cast: Cast
) -> None:
    closed = await close_month(database, clock, cast)
    await utc_corrections(database, clock).add(
        await event_id_of(database, ledger), Correction(note="late", completion_tokens=-1)
    )
    assert await broken_invariants(database_url) == set()
    async with database.writing() as connection:
        await take(connection, f"invoice:{str(closed.head.number)[:4]}")
    assert await broken_invariants(database_url) == {"invoices"}


async def test_a_closed_invoice_that_is_not_the_sum_of_its_events_is_found(
    database: Database, database_url: str, ledger: str, clock: FakeClock, cast: Cast
) -> None:
    await close_month(database, clock, cast)
    async with database.writing() as connection:
        await connection.execute(delete(tables.requests))
    await change(database, ledger, completion_tokens=8, cost_picos=14 * 1_500_000 + 16 * 150_000 + 8 * 6_000_000)
    assert await broken_invariants(database_url) == {"invoices"}


async def batch_work_beside(database: Database, request_id: str) -> str:
    """Write a request like this one that was batch work, at the same price; return its id."""
    events, twin = tables.usage_events, f"{request_id}_batch"
    async with database.writing() as connection:
        query = select(events).where(events.c.request_id == request_id, events.c.kind == "usage")
        row = dict((await connection.execute(query)).mappings().one())
        row |= {"request_id": twin, "batch": True, "posting": await take(connection, POSTING)}
        row.pop("id")
        await connection.execute(insert(events).values(**row))
        request = dict((await connection.execute(select(tables.requests))).mappings().one())
        await connection.execute(insert(tables.requests).values(**request | {"id": twin, "batch": True}))
    return twin


async def close_without_batch_work(database: Database, clock: FakeClock, cast: Cast, batch_request: str) -> Invoice:
    """Close the month as a version without batch work does: its event is not marked, and neither are the invoice's lines."""
    await change(database, batch_request, batch=False)
    closed = await close_month(database, clock, cast)
    assert not any(line.batch for line in closed.lines)
    await change(database, batch_request, batch=True)
    return closed


async def test_an_invoice_closed_by_a_version_without_batch_work_passes(
    database: Database, database_url: str, ledger: str, clock: FakeClock, cast: Cast
) -> None:
    await FreeAllowances(database, clock).set(cast.bob.tenant.id, f"{clock.now():%Y-%m}", 20, access=OWNER)
    batch_request = await batch_work_beside(database, ledger)
    closed = await close_without_batch_work(database, clock, cast, batch_request)
    assert [(line.kind, line.batch, line.requests) for line in closed.lines[:3]] == [
        ("prompt", False, 2), ("cached_prompt", False, 2), ("completion", False, 2),
    ]  # fmt: skip
    assert await broken_invariants(database_url) == set()


@on_databases(
    "statement",
    "UPDATE invoice_lines SET tokens = tokens + 1 WHERE kind = 'prompt'",
    "UPDATE invoice_lines SET requests = 1 WHERE kind = 'completion'",
    "UPDATE invoice_lines SET batch = (1 = 1) WHERE kind = 'prompt'",
    "DELETE FROM invoice_lines WHERE kind = 'cached_prompt'",
)
async def test_changed_lines_of_an_invoice_closed_without_batch_work_are_found(
    database: Database, database_url: str, ledger: str, clock: FakeClock, cast: Cast, statement: str
) -> None:
    batch_request = await batch_work_beside(database, ledger)
    await close_without_batch_work(database, clock, cast, batch_request)
    await tamper(database, statement)
    assert await broken_invariants(database_url) == {"invoices"}


async def test_an_invoice_line_that_lost_its_batch_mark_is_found(
    database: Database, database_url: str, ledger: str, clock: FakeClock, cast: Cast
) -> None:
    await batch_work_beside(database, ledger)
    closed = await close_month(database, clock, cast)
    assert [line.batch for line in closed.lines] == [False, False, False, True, True, True]
    assert await broken_invariants(database_url) == set()
    await tamper(database, "UPDATE invoice_lines SET batch = (1 = 0) WHERE kind = 'completion'")
    assert await broken_invariants(database_url) == {"invoices"}


async def test_a_correction_of_batch_work_by_a_version_without_batch_work_passes(
    database: Database, database_url: str, ledger: str
) -> None:
    batch_request = await batch_work_beside(database, ledger)
    await adjust_by_hand(database, batch_request, batch=False, completion_tokens=-1, cost_picos=-6_000_000)
    assert await broken_invariants(database_url) == set()
    await adjust_by_hand(database, ledger, batch=True, completion_tokens=-1, cost_picos=-6_000_000)
    assert await broken_invariants(database_url) == {"corrections"}


@on_databases(
    "statement",
    "UPDATE invoices SET total_micros = 1",
    "UPDATE invoices SET tax_micros = -5000",
    "UPDATE invoices SET currency = 'JPY'",
    'UPDATE invoices SET buyer = \'{"name": "somebody else"}\'',
    "UPDATE invoices SET seller = '{}'",
    "UPDATE invoices SET number = '2026-0002'",
    "UPDATE invoices SET state = 'draft'",
    "DELETE FROM invoices; UPDATE counters SET value = 0 WHERE name <> 'posting'",
    "UPDATE invoice_lines SET rounded_micros = -1 WHERE kind = 'free_allowance'",
    "DELETE FROM invoice_lines WHERE kind = 'free_allowance'",
    "UPDATE free_allowances SET monthly_micros = 7",
    "DELETE FROM audit_log WHERE action = 'invoice.close'",
)
async def test_a_closed_invoice_changed_after_closing_is_found(
    database: Database, database_url: str, ledger: str, clock: FakeClock, cast: Cast, statement: str
) -> None:
    await FreeAllowances(database, clock).set(cast.bob.tenant.id, f"{clock.now():%Y-%m}", 20, access=OWNER)
    closed = await close_month(database, clock, cast)
    assert closed.lines[-1].kind == "free_allowance"
    assert await broken_invariants(database_url) == set()
    lines = ["DELETE FROM invoice_lines"] if statement.startswith("DELETE FROM invoices") else []
    await tamper(database, *lines, *statement.split("; "))
    assert await broken_invariants(database_url) - {"audit"} == {"invoices"}


async def test_a_changed_audit_log_is_found(database_url: str, ledger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.tenancy.audit_chain.hash_of", lambda *_: "0" * 64)
    assert await broken_invariants(database_url) == {"audit"}
