"""A database that the first version filled: what it holds comes through the upgrade whole, and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, MetaData, Table, create_engine, event, insert, select, text
from sqlalchemy.pool import NullPool

from appliance.base import db, tables
from appliance.base.clock import SystemClock
from appliance.base.db import Database
from appliance.cli import invariants
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.corrections import Correction, Corrections
from appliance.metering.ledger.recovery import begin_epoch, recover
from appliance.metering.prices import PriceBook
from appliance.metering.usage import UsageReports

AT = datetime(2026, 3, 29, 23, 59, 58, 1, tzinfo=UTC)  # two of four events lie in the next day of UTC
MONEY = ("tenants", "api_keys", "members", "admin_tokens", "prices", "epochs", "usage_events", "requests")
PRICE: dict[str, Any] = {"prompt": 1_500_000, "cached_prompt": 150_000, "completion": 6_000_000}
Rows = dict[str, list[dict[str, Any]]]


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    if url.startswith("sqlite"):
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=ON"))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def contents(url: str) -> Rows:
    """Every row of the tables of the first version, with the columns that they have now, in order."""
    with connected(url) as connection:
        found = MetaData()
        found.reflect(connection, only=MONEY)
        return {
            name: [dict(row) for row in connection.execute(select(found.tables[name]).order_by(text("id"))).mappings()]
            for name in MONEY
        }


def moment(url: str, offset: timedelta = timedelta()) -> datetime:
    """A time as the column takes it: SQLite's knows no zone."""
    return (AT + offset).replace(tzinfo=None) if url.startswith("sqlite") else AT + offset


@pytest.fixture
def filled_url(empty_database_url: str) -> str:
    """A database of the first version with two tenants, four events of every kind, and people."""
    url = empty_database_url
    db.upgrade(url, "0001")
    at = moment(url)
    with connected(url) as connection:
        found = MetaData()
        found.reflect(connection)

        def add(into: str, /, **values: Any) -> None:
            table: Table = found.tables[into]
            times = {column.name: at for column in table.columns if column.name in ("created_at", "started_at", "admitted_at")}
            connection.execute(insert(table).values(**{**times, **values}))

        for name in ("bob", "charlie"):
            add("tenants", id=f"tn_{name}", name=name, tier="standard", weight=1, suspended=False)
            shown = {"name": "key", "prefix": f"gh_{name}", "digest": name, "scopes": '["inference"]'}
            add("api_keys", id=f"key_{name}", tenant_id=f"tn_{name}", **shown)
        add("members", id="mb_alice", email="alice@example.com", password_hash="x", role="owner")
        session = {"csrf_token": "c", "user_agent": "", "address": "", "last_seen_at": at, "expires_at": at}
        for token in ("a" * 64, "b" * 64):
            add("sessions", token_hash=token, member_id="mb_alice", **session)
        add("admin_tokens", id="tok", name="ci", digest="d", role="viewer")
        add("prices", id="price_1", model="demo", effective_from=at, currency="EUR", batch_percent=50, **PRICE)
        add("epochs", id="epoch_1", version="1", pid=1)
        for number, (owner, status) in enumerate(
            [("bob", "posted"), ("bob", "voided"), ("charlie", "recovered"), ("bob", "pending")]
        ):
            _add_event(add, number, owner, status, at=moment(url, timedelta(seconds=number)))
    return url


def _add_event(add: Any, number: int, owner: str, status: str, *, at: datetime) -> None:
    billed = status in ("posted", "recovered")
    counts = {"prompt_tokens": 30, "cached_tokens": 16, "completion_tokens": 7} if billed or status == "pending" else {}
    empty = {"prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}
    who: dict[str, Any] = {"tenant_id": f"tn_{owner}", "key_id": f"key_{owner}", "model": "demo"}
    who |= {"endpoint": "/v1/chat/completions", "finish_reason": None if status == "pending" else "stop"}
    add(
        "usage_events",
        request_id=f"req_{number}",
        epoch_id="epoch_1",
        kind="usage",
        status=status,
        reserved_tokens=100,
        estimated=status == "recovered",
        price_id="price_1",
        cost_picos=14 * 1_500_000 + 16 * 150_000 + 7 * 6_000_000 if billed else 0,
        currency="EUR",
        admitted_at=at,
        settled_at=None if status == "pending" else at,
        **who,
        **(empty | counts),
    )
    add("requests", id=f"req_{number}", stream=True, kv_blocks=1, preemptions=0, admitted_at=at, **who, **(empty | counts))


def same(before: Rows, after: Rows) -> bool:
    """Whether every row and column of `before` is in `after` as it was."""
    for name, rows in before.items():
        kept = [{column: row[column] for column in rows[0]} for row in after[name]]
        assert kept == rows, name
    return True


async def test_what_the_first_version_wrote_comes_through_whole(filled_url: str) -> None:
    before = contents(filled_url)
    db.upgrade(filled_url)
    after = contents(filled_url)

    assert same(before, after)
    events = {row["request_id"]: row for row in after["usage_events"]}
    assert [events[f"req_{number}"]["posting"] for number in range(4)] == [1, 2, 3, None]
    assert [str(events[f"req_{number}"]["billing_day"]) for number in range(4)] == ["2026-03-29"] * 2 + ["2026-03-30"] * 2
    assert {(row["rejected_tokens"], row["price_basis_points"], row["cause"]) for row in after["usage_events"]} == {
        (0, 10_000, None)
    }
    with connected(filled_url) as connection:
        ids = connection.execute(text("SELECT id FROM sessions")).scalars().all()
    assert len(set(ids)) == 2
    findings = await invariants.check(filled_url, running=False)
    assert [finding.name for finding in findings if finding.state != "holds"] == ["pending"]


async def test_the_upgraded_database_serves_at_once(filled_url: str) -> None:
    db.upgrade(filled_url)
    database = Database.open(filled_url)
    try:
        epoch_id = await begin_epoch(database, SystemClock(), "next")
        assert await recover(database, SystemClock(), epoch_id) == 1
        rows = await UsageReports(database).usage(AT - timedelta(days=2), AT + timedelta(days=2), "day", ["tenant"])
        found = [(row.tenant_id, row.requests, row.completion_tokens) for row in rows]
        assert found == [("tn_bob", 1, 7), ("tn_bob", 1, 7), ("tn_charlie", 1, 7)]
        # The first version knew days of UTC alone; those events keep their day, and the sums move to where it begins elsewhere.
        assert await rollups.align(database, BillingCalendar("Europe/Berlin"))
        assert not await rollups.align(database, BillingCalendar("Europe/Berlin"))
    finally:
        await database.close()
    findings = await invariants.check(filled_url, running=False, time_zone="Europe/Berlin")
    assert [finding.name for finding in findings if finding.state != "holds"] == []


async def test_the_way_back_keeps_what_the_first_version_knew(filled_url: str) -> None:
    before = contents(filled_url)
    db.upgrade(filled_url)
    await use_what_is_new(filled_url)
    db.downgrade(filled_url, "0001")
    after = contents(filled_url)
    extra = {name: [row for row in after[name] if row not in before[name]] for name in MONEY}

    assert same(before, {name: [row for row in after[name] if row in before[name]] for name in MONEY})
    assert {name: len(rows) for name, rows in extra.items() if rows} == {"prices": 2}
    assert len({row["model"] for row in extra["prices"]} | {"demo"}) == 3
    db.upgrade(filled_url)
    findings = await invariants.check(filled_url, running=False)
    assert [finding.name for finding in findings if finding.state == "broken"] == []


async def use_what_is_new(url: str) -> None:
    """Write what the first version has no place for: a correction, prices in two more currencies at once, a box-less member."""
    database, clock = Database.open(url), SystemClock()
    try:
        with connected(url) as connection:
            settled = select(tables.usage_events.c.id).where(tables.usage_events.c.request_id == "req_0")
            event_id = connection.execute(settled).scalar_one()
        await Corrections(database, clock).add(event_id, Correction(note="too much", completion_tokens=-1))
        for currency in ("CHF", "USD"):
            await PriceBook(database, clock).add(model="demo", currency=currency, effective_from=AT, **PRICE)
        async with database.writing() as connection_:
            member = {"id": "mb_bob", "email": "bob@example.com", "password_hash": "x", "role": "member", "created_at": AT}
            await connection_.execute(insert(tables.members).values(**member))
    finally:
        await database.close()
