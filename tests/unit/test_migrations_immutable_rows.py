"""The database rejects changes of final rows, and permits changes of all others."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import insert, text
from sqlalchemy.exc import DatabaseError

from appliance.base import tables
from appliance.base.db import Database
from tests.support.cast import Cast
from tests.support.clock import FakeClock

REFUSED = "stays as it is"
pytestmark = pytest.mark.on_each_database  # each has triggers of its own


@pytest.fixture
async def written(database: Database, cast: Cast, clock: FakeClock) -> Database:
    """Bob's database: one posted and one pending event, a closed and a draft invoice with a line each, an empty one."""
    now = clock.now()
    event: dict[str, Any] = {
        "tenant_id": cast.bob.tenant.id, "key_id": cast.bob.key.id, "epoch_id": cast.epoch_id, "model": "demo",
        "endpoint": "/v1/chat/completions", "kind": "usage", "reserved_tokens": 0, "prompt_tokens": 1, "cached_tokens": 0,
        "completion_tokens": 1, "estimated": False, "cost_picos": 0, "currency": "EUR", "billing_day": now.date(),
        "admitted_at": now,
    }  # fmt: skip
    invoice = {"tenant_id": cast.bob.tenant.id, "currency": "EUR", "total_micros": 1, "tax_micros": 0, "created_at": now}
    line = {
        "position": 1,
        "kind": "prompt",
        "month": "2026-10",
        "tokens": 1,
        "requests": 1,
        "exact_picos": "1",
        "rounded_micros": 0,
    }
    async with database.writing() as connection:
        await connection.execute(
            insert(tables.usage_events),
            [event | {"request_id": f"req_{status}", "status": status} for status in ("posted", "pending")],
        )
        for month, state in (("2026-09", "closed"), ("2026-10", "draft")):
            await connection.execute(insert(tables.invoices).values(id=f"inv_{state}", month=month, state=state, **invoice))
            await connection.execute(insert(tables.invoice_lines).values(invoice_id=f"inv_{state}", **line))
        price = {"model": "demo", "currency": "EUR", "prompt": 1, "cached_prompt": 1, "completion": 1, "batch_percent": 100}
        for name, year in (("begun", 2020), ("to_come", 2190)):
            from_ = now.replace(year=year)
            await connection.execute(insert(tables.prices).values(id=name, effective_from=from_, created_at=now, **price))
        for month in ("2026-09", "2026-10"):
            await connection.execute(
                insert(tables.free_allowances).values(
                    id=month, tenant_id=cast.bob.tenant.id, first_month=month, monthly_micros=5, created_at=now
                )
            )
        await connection.execute(insert(tables.invoices).values(id="inv_empty", month="2026-08", state="closed", **invoice))
    return database


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE usage_events SET cost_picos = 9 WHERE status = 'posted'",
        "UPDATE usage_events SET status = 'voided' WHERE status = 'posted'",
        "DELETE FROM usage_events WHERE status = 'posted'",
        "DELETE FROM usage_events WHERE status = 'pending'",
        "UPDATE invoices SET total_micros = 9 WHERE state = 'closed'",
        "UPDATE invoices SET state = 'draft' WHERE state = 'closed'",
        "DELETE FROM invoices WHERE id = 'inv_empty'",
        "UPDATE invoice_lines SET tokens = 9 WHERE invoice_id = 'inv_closed'",
        "DELETE FROM invoice_lines WHERE invoice_id = 'inv_closed'",
        "UPDATE prices SET prompt = 9 WHERE id = 'begun'",
        "UPDATE prices SET prompt = 9 WHERE id = 'to_come'",
        "DELETE FROM prices WHERE id = 'begun'",
        "UPDATE free_allowances SET monthly_micros = 9 WHERE first_month = '2026-09'",
        "DELETE FROM free_allowances WHERE first_month = '2026-09'",
    ],
)
async def test_final_rows_cannot_be_changed_or_deleted(written: Database, statement: str) -> None:
    with pytest.raises(DatabaseError, match=REFUSED):
        async with written.writing() as connection:
            await connection.execute(text(statement))


def _copied(table: str, where: str, **changes: str) -> str:
    """Return a statement that copies a row of `table` with `changes` and replaces conflicting rows."""
    names = [column.name for column in tables.metadata.tables[table].columns]
    values = ", ".join(changes.get(name, name) for name in names)
    more = [name for name in changes if name not in names]
    into, given = ", ".join([*names, *more]), ", ".join([values, *(changes[name] for name in more)])
    return f"INSERT OR REPLACE INTO {table} ({into}) SELECT {given} FROM {table} WHERE {where}"


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)  # PostgreSQL has no OR REPLACE
@pytest.mark.parametrize(
    "statement",
    [
        _copied("usage_events", "status = 'posted'", cost_picos="9"),
        _copied("usage_events", "status = 'posted'", id="NULL", posting="NULL", cost_picos="9"),
        _copied("usage_events", "status = 'posted'", id="NULL", request_id="'other'"),
        _copied("usage_events", "status = 'pending'", cost_picos="9"),
        "UPDATE OR REPLACE usage_events SET posting = 7 WHERE status = 'pending'",
        "UPDATE OR REPLACE usage_events SET rowid = 1 WHERE status = 'pending'",
        "UPDATE OR REPLACE usage_events SET request_id = 'req_posted' WHERE status = 'pending'",
        _copied("invoices", "id = 'inv_empty'", total_micros="9"),
        _copied("invoices", "id = 'inv_empty'", id="'inv_other'", state="'draft'"),
        _copied("invoices", "id = 'inv_empty'", id="'inv_other'", month="'2026-01'", rowid="rowid"),
        "UPDATE OR REPLACE invoices SET month = '2026-08' WHERE state = 'draft'",
        _copied("invoice_lines", "invoice_id = 'inv_closed'", tokens="9"),
        "UPDATE OR REPLACE invoice_lines SET invoice_id = 'inv_closed' WHERE invoice_id = 'inv_draft'",
        _copied("prices", "id = 'begun'", prompt="9"),
        _copied("prices", "id = 'begun'", id="'other'", prompt="9"),
        _copied("free_allowances", "id = '2026-09'", monthly_micros="9"),
        "UPDATE OR REPLACE free_allowances SET first_month = '2026-09' WHERE first_month = '2026-10'",
        _copied("audit_log", "id = 1", action="'other'"),
        _copied("audit_log", "id = 1", id="NULL"),
    ],
)
async def test_final_rows_cannot_be_replaced(written: Database, statement: str) -> None:
    async with written.writing() as connection:
        await connection.execute(text("DROP TRIGGER usage_events_no_update"))
        await connection.execute(text("UPDATE usage_events SET posting = 7 WHERE status = 'posted'"))
    with pytest.raises(DatabaseError, match=REFUSED):
        async with written.writing() as connection:
            await connection.execute(text(statement))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "statement",
    [
        _copied("invoices", "id = 'inv_draft'", total_micros="9"),
        _copied("prices", "id = 'to_come'", prompt="9"),
        _copied("free_allowances", "id = '2026-10'", monthly_micros="9"),
    ],
)
async def test_other_rows_can_be_replaced(written: Database, statement: str) -> None:
    async with written.writing() as connection:
        assert (await connection.execute(text(statement))).rowcount == 1


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)  # SQLite has no TRUNCATE
async def test_truncating_a_table_is_refused(written: Database) -> None:
    with pytest.raises(DatabaseError, match=REFUSED):
        async with written.writing() as connection:
            await connection.execute(text("TRUNCATE usage_events, audit_log CASCADE"))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE usage_events SET status = 'posted', posting = 1 WHERE status = 'pending'",
        "UPDATE usage_events SET completion_tokens = 7 WHERE status = 'pending'",
        "UPDATE invoices SET state = 'closed', number = 'R-1' WHERE state = 'draft'",
        "UPDATE invoice_lines SET tokens = 9 WHERE invoice_id = 'inv_draft'",
        "DELETE FROM invoice_lines WHERE invoice_id = 'inv_draft'",
        "DELETE FROM prices WHERE id = 'to_come'",
        "UPDATE free_allowances SET monthly_micros = 9 WHERE first_month = '2026-10'",
        "DELETE FROM free_allowances WHERE first_month = '2026-10'",
    ],
)
async def test_other_rows_can_be_changed(written: Database, statement: str) -> None:
    async with written.writing() as connection:
        assert (await connection.execute(text(statement))).rowcount == 1
