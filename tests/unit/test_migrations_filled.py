"""Data of an older version survives the upgrade completely, and the downgrade."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, Table, create_engine, event, insert, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.pool import NullPool

from appliance.base import migrations, tables
from appliance.base.clock import SystemClock
from appliance.base.db import Database
from appliance.metering.appliance_records import read_record
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants.check import check_ledger
from appliance.metering.ledger import rollups
from appliance.metering.ledger.corrections import Correction
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.ledger.records import PendingEvent, Settlement, Usage
from appliance.metering.usage import UsageReports
from tests.support.cast import OWNER
from tests.support.ledgers import euro_prices, utc_corrections, utc_ledger, utc_recover

AT = datetime(2026, 3, 29, 23, 59, 58, 1, tzinfo=UTC)  # two of four events lie in the next day of UTC
MONEY = ("tenants", "api_keys", "members", "admin_tokens", "prices", "epochs", "usage_events", "requests")
PRICE: dict[str, Any] = {"prompt": 1_500_000, "cached_prompt": 150_000, "completion": 6_000_000}
TIMES = ("created_at", "started_at", "admitted_at", "at")
Rows = dict[str, list[dict[str, Any]]]
# What the columns of later versions say of rows that the first wrote.
DEFAULTS: dict[str, dict[str, Any]] = {
    "tenants": {"limit_mode": "enforce", "cut_at_budget": False, "currency": None, "billing": None, "alert_percents": None},
    "api_keys": {"limit_mode": "enforce", "model_limits": None, "replaced_by": None},
    "members": {"password_temporary": False, "totp_secret": None, "oidc_issuer": None, "oidc_subject": None},
    "sessions": {"method": "password"},
    "prices": {"rejected_draft": 0, "tier_percents": None},
    "usage_events": {
        "rejected_tokens": 0, "price_basis_points": 10_000, "cause": None, "corrects_id": None, "note": None, "batch": False,
        "idempotency_key": None,
    },
    "requests": {
        "batch": False, "tenant_open": None, "admission_wait_us": None, "awaited_limit": None, "batch_size_mean": None,
    },
}  # fmt: skip
NEW_NAMES = {"box_records": "appliance_records", "usage_box_rollups": "usage_appliance_rollups"}


@contextmanager
def connected(url: str) -> Iterator[Connection]:
    engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"), poolclass=NullPool)
    if url.startswith("sqlite"):
        event.listen(engine, "connect", lambda connection, _: connection.execute("PRAGMA foreign_keys=ON"))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


_SCHEMAS: dict[tuple[str, str], MetaData] = {}


def schema(connection: Connection, *, anew: bool = False) -> MetaData:
    """The tables as the database has them, which is asked only `anew` or at a version that no database here had before."""
    version = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one()
    place = (connection.dialect.name, version)
    if anew or place not in _SCHEMAS:
        _SCHEMAS[place] = MetaData()
        _SCHEMAS[place].reflect(connection)
    return _SCHEMAS[place]


def contents(url: str) -> Rows:
    """Every row of the tables of the first version, with the columns that they have now, in order."""
    with connected(url) as connection:
        found = schema(connection)
        return {
            name: [dict(row) for row in connection.execute(select(found.tables[name]).order_by(text("id"))).mappings()]
            for name in MONEY
        }


def everything(url: str, *, anew: bool = False) -> Rows:
    """Every row of every table, in the order of their keys."""
    with connected(url) as connection:
        found = schema(connection, anew=anew)
        return {
            name: [dict(row) for row in connection.execute(select(table).order_by(*table.primary_key)).mappings()]
            for name, table in found.tables.items()
            if name != "alembic_version"
        }


def moment(url: str, offset: timedelta = timedelta()) -> datetime:
    """A time as the column takes it: SQLite's knows no zone."""
    return (AT + offset).replace(tzinfo=None) if url.startswith("sqlite") else AT + offset


@contextmanager
def adding(url: str) -> Iterator[Callable[..., None]]:
    """A function that adds a row to a table as the database has it; times that are not given are `AT`."""
    with connected(url) as connection:
        found = schema(connection)

        def add(into: str, /, **values: Any) -> None:
            table: Table = found.tables[into]
            times = {column.name: moment(url) for column in table.columns if column.name in TIMES}
            connection.execute(insert(table).values(**{**times, **values}))

        yield add


def fill_first(url: str) -> None:
    """Make a database of the first version with two tenants, four events of every kind, and people."""
    migrations.upgrade(url, "0001")
    at = moment(url)
    with adding(url) as add:
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


def fill_second(url: str) -> None:
    """Make a database of the second version: what the first wrote, a correction, invoices closed and not, an audit entry."""
    fill_first(url)
    migrations.upgrade(url, "0002")
    at, corrected = moment(url), contents(url)["usage_events"][0]
    lower = {"completion_tokens": -1, "prompt_tokens": 0, "cached_tokens": 0, "cost_picos": -6_000_000}
    with adding(url) as add:
        correction = {"id": 5, "kind": "adjustment", "corrects_id": corrected["id"], "posting": 4, "note": "too much"}
        add("usage_events", **corrected | lower | correction)
        more = {"rejected_draft": 750_000, "tier_percents": {"interactive": 150}}
        add("prices", id="price_2", model="demo", effective_from=at, currency="CHF", batch_percent=50, **more, **PRICE)
        add("free_allowances", id="free_1", tenant_id="tn_bob", first_month="2026-03", monthly_micros=5)
        for owner, state, ended in (("bob", "closed", at), ("charlie", "draft", None)):
            invoice = {"month": "2026-03", "number": "2026-1" if ended else None, "state": state, "closed_at": ended}
            sums = {"currency": "EUR", "total_micros": 65, "tax_micros": 12, "through_posting": 4 if ended else None}
            add("invoices", id=f"inv_{owner}", tenant_id=f"tn_{owner}", seller={"name": "box"}, **invoice, **sums)
            line = {"model": "demo", "kind": "prompt", "month": "2026-03", "unit_price": 1_500_000, "tokens": 43, "requests": 1}
            add("invoice_lines", invoice_id=f"inv_{owner}", position=0, exact_picos="65400000", rounded_micros=65, **line)
        actor = {"actor_kind": "member", "actor_id": "mb_alice", "actor_name": "alice@example.com"}
        entry = {"action": "invoice.close", "target_kind": "invoice", "target_id": "inv_bob", "after": '{"total_micros": 65}'}
        add("audit_log", previous_hash="0" * 64, hash="1" * 64, **actor, **entry)
        add("audit_head", id=1, entries=1, hash="1" * 64)
    with connected(url) as connection:
        connection.execute(text("UPDATE counters SET value = 4 WHERE name = 'posting'"))


def fill_third(url: str) -> None:
    """Make a database of the third version, which keeps what the second wrote."""
    fill_second(url)
    migrations.upgrade(url, "0003")


def fill_fourth(url: str) -> None:
    """Make a database of the fourth version, which knows of batch work: what runs when it ends is."""
    fill_third(url)
    migrations.upgrade(url, "0004")
    with connected(url) as connection:
        connection.execute(text("UPDATE usage_events SET batch = true WHERE status = 'pending'"))


def fill_fifth(url: str) -> None:
    """Make a database of the fifth version, which has sums of the appliance."""
    fill_fourth(url)
    migrations.upgrade(url, "0005")


def fill_sixth(url: str) -> None:
    """Make a database of the sixth version, in which nothing takes the place of what it keeps."""
    fill_fifth(url)
    migrations.upgrade(url, "0006")


def fill_seventh(url: str) -> None:
    """Make a database of the seventh version, which finds late postings by an index."""
    fill_sixth(url)
    migrations.upgrade(url, "0007")


def fill_eighth(url: str) -> None:
    """Make a database of the eighth version, in which the seller is a record of the box."""
    fill_seventh(url)
    migrations.upgrade(url, "0008")
    with adding(url) as add:
        add("box_records", name="seller", value={"name": "Alice"}, updated_at=moment(url))


def fill_ninth(url: str) -> None:
    """Make a database of the ninth version, whose tables are named after the appliance."""
    fill_eighth(url)
    migrations.upgrade(url, "0009")


def fill_tenth(url: str) -> None:
    """Make a database of the tenth version, which knows why requests were slow."""
    fill_ninth(url)
    migrations.upgrade(url, "0010")


FILLED: dict[str, Callable[[str], None]] = {
    "0001": fill_first,
    "0002": fill_second,
    "0003": fill_third,
    "0004": fill_fourth,
    "0005": fill_fifth,
    "0006": fill_sixth,
    "0007": fill_seventh,
    "0008": fill_eighth,
    "0009": fill_ninth,
    "0010": fill_tenth,
}


@pytest.fixture
def filled_url(empty_database_url: str) -> str:
    """The URL of a database that the first version filled."""
    fill_first(empty_database_url)
    return empty_database_url


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
    """Whether every row and column of `before` is in `after` as it was, in the table that has its name or its new one."""
    for name, rows in before.items():
        kept = [{column: row[column] for column in rows[0]} for row in after[NEW_NAMES.get(name, name)]]
        assert kept == rows, name
    return True


def test_every_older_version_has_test_data_here() -> None:
    scripts = ScriptDirectory(str(Path(__file__).parents[2] / "migrations"))
    versions = {script.revision for script in scripts.walk_revisions()}
    assert set(FILLED) == versions - {migrations.head_revision()}


@pytest.mark.parametrize("version", FILLED)
def test_upgrade_and_downgrade_keep_every_row_of_each_version(version: str, empty_database_url: str) -> None:
    url = empty_database_url
    FILLED[version](url)
    before = everything(url)
    migrations.upgrade(url)
    newest = everything(url)
    migrations.downgrade(url, version)

    assert same(before, newest)
    assert everything(url, anew=True) == before
    migrations.upgrade(url)
    assert everything(url, anew=True) == newest


def test_final_rows_of_older_versions_are_immutable_after_the_upgrade(empty_database_url: str) -> None:
    fill_second(empty_database_url)
    migrations.upgrade(empty_database_url)
    for statement in (
        "UPDATE usage_events SET cost_picos = 0 WHERE id = 5",
        "UPDATE prices SET prompt = 0 WHERE id = 'price_2'",
        "UPDATE invoices SET total_micros = 0 WHERE id = 'inv_bob'",
        "DELETE FROM invoice_lines WHERE invoice_id = 'inv_bob'",
        "UPDATE free_allowances SET monthly_micros = 0",
        "DELETE FROM audit_log",
    ):
        with pytest.raises(IntegrityError, match="written for good"), connected(empty_database_url) as connection:
            connection.execute(text(statement))


async def test_data_of_the_first_version_is_complete_after_the_upgrade(filled_url: str) -> None:
    before = contents(filled_url)
    migrations.upgrade(filled_url)
    after = contents(filled_url)

    assert same(before, after)
    events = {row["request_id"]: row for row in after["usage_events"]}
    assert [events[f"req_{number}"]["posting"] for number in range(4)] == [1, 2, 3, None]
    assert [str(events[f"req_{number}"]["billing_day"]) for number in range(4)] == ["2026-03-29"] * 2 + ["2026-03-30"] * 2
    now = everything(filled_url)
    for name, defaults in DEFAULTS.items():
        assert [{column: row[column] for column in defaults} for row in now[name]] == [defaults] * len(now[name]), name
    assert len({row["id"] for row in now["sessions"]}) == 2
    findings = await check_ledger(filled_url, running=False, time_zone="UTC")
    assert [finding.name for finding in findings if finding.state != "holds"] == ["pending"]


async def test_the_seller_and_the_sums_of_the_eighth_version_are_found_under_their_new_names(empty_database_url: str) -> None:
    fill_eighth(empty_database_url)
    migrations.upgrade(empty_database_url)
    async with Database.open(empty_database_url) as database, database.reading() as connection:
        assert await read_record(connection, "seller") == {"name": "Alice"}
        sums = tables.usage_appliance_rollups.c
        days = select(sums.model, sums.completion_tokens).where(sums.bucket == "day", sums.currency == "EUR")
        assert {row.model for row in await connection.execute(days)} == {"demo"}


async def test_the_upgraded_database_can_be_used_at_once(filled_url: str) -> None:
    migrations.upgrade(filled_url)
    async with Database.open(filled_url) as database:
        epoch_id = await begin_epoch(database, SystemClock(), "next")
        assert await utc_recover(database, SystemClock(), epoch_id) == 1
        rows = await UsageReports(database, calendar=BillingCalendar()).usage(
            AT - timedelta(days=2), AT + timedelta(days=2), "day", ["tenant"], access=OWNER
        )
        found = [(row.tenant_id, row.requests, row.completion_tokens) for row in rows]
        assert found == [("tn_bob", 1, 7), ("tn_bob", 1, 7), ("tn_charlie", 1, 7)]
        # The first version knew days of UTC alone; elsewhere a day begins at another hour.
        assert await rollups.align_days(database, BillingCalendar("Europe/Berlin"))
        assert not await rollups.align_days(database, BillingCalendar("Europe/Berlin"))
    findings = await check_ledger(filled_url, running=False, time_zone="Europe/Berlin")
    assert [finding.name for finding in findings if finding.state != "holds"] == []


async def test_a_downgrade_to_the_first_version_keeps_its_data(filled_url: str) -> None:
    before = contents(filled_url)
    migrations.upgrade(filled_url)
    await use_what_is_new(filled_url)
    migrations.downgrade(filled_url, "0001")
    after = contents(filled_url)
    extra = {name: [row for row in after[name] if row not in before[name]] for name in MONEY}

    assert same(before, {name: [row for row in after[name] if row in before[name]] for name in MONEY})
    assert {name: len(rows) for name, rows in extra.items() if rows} == {"prices": 2}
    assert len({(row["model"], row["effective_from"]) for row in after["prices"]}) == len(after["prices"])
    migrations.upgrade(filled_url)
    findings = await check_ledger(filled_url, running=False, time_zone="UTC")
    assert [finding.name for finding in findings if finding.state == "broken"] == []


@pytest.mark.parametrize("version", ["0003", "0002", "0001"])
async def test_a_downgrade_and_upgrade_keep_batch_marks_and_prices(version: str, filled_url: str) -> None:
    migrations.upgrade(filled_url)
    await do_batch_work(filled_url)
    before = everything(filled_url)
    migrations.downgrade(filled_url, version)
    migrations.upgrade(filled_url)
    after = everything(filled_url)

    for name in ("usage_events", "requests"):
        assert [row["batch"] for row in after[name]] == [row["batch"] for row in before[name]]
        assert sum(row["batch"] for row in after[name]) == 1
    figures = ("request_id", "status", "cost_picos", "price_basis_points")
    assert [[row[name] for name in figures] for row in after["usage_events"]] == [
        [row[name] for name in figures] for row in before["usage_events"]
    ]
    findings = await check_ledger(filled_url, running=False, time_zone="UTC")
    assert [finding.text for finding in findings if finding.state == "broken"] == []


async def test_a_downgrade_and_upgrade_keep_the_keys_of_corrections(filled_url: str) -> None:
    migrations.upgrade(filled_url)
    database = Database.open(filled_url)
    try:
        made = await utc_corrections(database, SystemClock()).add(
            1, Correction(note="too much", completion_tokens=-1), idempotency_key="K"
        )
    finally:
        await database.close()
    before = everything(filled_url)
    migrations.downgrade(filled_url, "0010")
    migrations.upgrade(filled_url)

    assert everything(filled_url, anew=True) == before
    assert [row["id"] for row in before["usage_events"] if row["idempotency_key"] == "K"] == [made.id]


def test_a_downgrade_and_upgrade_keep_the_reasons_on_lines_of_invoices(empty_database_url: str) -> None:
    fill_second(empty_database_url)
    migrations.upgrade(empty_database_url)
    line = {"model": "demo", "kind": "adjustment", "month": "2026-03", "tokens": -1, "requests": 0, "exact_picos": "-5000000"}
    with adding(empty_database_url) as add:
        reasons = {"texts": ["too much"], "left_out": 0}
        add("invoice_lines", invoice_id="inv_bob", position=1, rounded_micros=-5, reasons=reasons, **line)
    before = everything(empty_database_url)
    migrations.downgrade(empty_database_url, "0010")
    migrations.upgrade(empty_database_url)

    assert everything(empty_database_url, anew=True) == before
    assert [row["reasons"] for row in before["invoice_lines"] if row["position"] == 1] == [reasons]


async def do_batch_work(url: str) -> None:
    """Serve a request of Bob's as batch work."""
    database, clock = Database.open(url), SystemClock()
    try:
        price = await euro_prices(database, clock).current("demo", clock.now())
        assert price is not None
        ledger = utc_ledger(database, clock, await begin_epoch(database, clock, "test"))
        await ledger.start()
        entry = PendingEvent(
            request_id="req_flex", tenant_id="tn_bob", key_id="key_bob", model="demo", endpoint="/v1/chat/completions",
            stream=False, prompt_tokens=30, reserved_tokens=40, price=price, admitted_at=clock.now(),
            price_basis_points=price.rate("standard", batch=True).basis_points, batch=True,
        )  # fmt: skip
        await ledger.open(entry)
        usage = Usage(prompt_tokens=30, cached_tokens=16, completion_tokens=7)
        await ledger.settle(Settlement(request_id="req_flex", status="posted", finish_reason="stop", usage=usage))
        await ledger.stop()
    finally:
        await database.close()


async def use_what_is_new(url: str) -> None:
    """Write what the first version cannot store: a correction, two more currencies at once, a member without a role."""
    database, clock = Database.open(url), SystemClock()
    try:
        with connected(url) as connection:
            settled = select(tables.usage_events.c.id).where(tables.usage_events.c.request_id == "req_0")
            event_id = connection.execute(settled).scalar_one()
        await utc_corrections(database, clock).add(event_id, Correction(note="too much", completion_tokens=-1))
        for currency in ("CHF", "USD"):
            await euro_prices(database, clock).add(model="demo", currency=currency, effective_from=AT, **PRICE)
        async with database.writing() as connection_:
            member = {"id": "mb_bob", "email": "bob@example.com", "password_hash": "x", "role": "member", "created_at": AT}
            await connection_.execute(insert(tables.members).values(**member))
    finally:
        await database.close()
