"""Query plans of reports: index ranges instead of full scans, and only the rows of the owners concerned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest
from sqlalchemy import Select, insert, text
from sqlalchemy.dialects import sqlite

from appliance.base.db import Database
from appliance.base.tables import usage_rollups
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import COUNTS, SPLIT
from appliance.metering.usage_cover import STARTS_MAX, Segment, bucket_end, bucket_start, cover, reaching
from appliance.metering.usage_queries import OWNER, PROBES_MAX, Owners, Place, page_query, report_query, totals_query
from tests.support.cast import Cast

START = datetime(2026, 10, 24, 9, 41, 12, 345, tzinfo=UTC)
FIRST_HOUR = START.replace(minute=0, second=0, microsecond=0)
HOURS, OTHERS, OWN_SUMS = 120, 200, 10
GROUPINGS = [columns for size in range(len(OWNER) + 1) for columns in combinations(OWNER, size)]
BUCKETS = [("minute", 3), ("hour", 30), ("day", 400)]
WIDE = [(columns, *BUCKETS[number % len(BUCKETS)]) for number, columns in enumerate(GROUPINGS)]
NARROWED = [{}, {"tenant_id": {"tn_1"}}, {"key_id": {"key_1"}}, {"model": {"demo"}}, {"tenant_id": {"tn_1", "tn_2"}}]
NARROWED += [{"key_id": {"key_1", "key_2"}}, {"tenant_id": {"tn_1", "tn_2"}, "key_id": {"key_1", "key_2"}}]
FEW = [wanted for wanted in NARROWED if {"tenant_id", "key_id"} & set(wanted)]


def page(segments: Sequence[Segment], owners: Owners, after: Place | None) -> Select[Any]:
    """Return the query for 50 rows and one more."""
    return page_query(segments if after is None else reaching(segments, after.start_at), owners, 51, after)


def place_of(owners: Owners) -> Place:
    """Return a place in the second day of the report."""
    return Place(START.replace(minute=0) + timedelta(hours=30), (*(f"{name}_1" for name in owners.place), "EUR"))


async def lines_of(database: Database, query: Select[Any]) -> list[str]:
    """Return the lines of SQLite's plan for a query."""
    compiled = query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    async with database.reading() as connection:
        rows = (await connection.execute(text("EXPLAIN QUERY PLAN " + str(compiled).replace(":", r"\:")))).all()
    return [str(row[3]) for row in rows]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("columns", GROUPINGS, ids=lambda columns: "+".join(columns) or "nothing")
async def test_a_page_reads_the_sums_and_events_of_its_places_alone(database: Database, columns: tuple[str, ...]) -> None:
    segments = cover(START, START + timedelta(days=5), "hour", BillingCalendar("Europe/Berlin"))
    for wanted in NARROWED:
        owners = Owners(columns=columns, wanted=wanted)
        for after in (None, place_of(owners)):
            read = [line for line in await lines_of(database, page(segments, owners, after)) if "usage_" in line]
            assert read
            assert [line for line in read if not line.startswith("SEARCH")] == [], (wanted, after)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("columns", GROUPINGS, ids=lambda columns: "+".join(columns) or "nothing")
async def test_days_of_a_few_tenants_or_keys_are_read_without_those_of_others(
    database: Database, columns: tuple[str, ...]
) -> None:
    segments = cover(START, START + timedelta(days=30), "day", BillingCalendar("Europe/Berlin"))
    for wanted in FEW:
        owners = Owners(columns=columns, wanted=wanted)
        for query in (page_query(segments, owners, 51, None), report_query(segments, owners), totals_query(segments, owners)):
            read = [line for line in await lines_of(database, query) if "usage_rollups" in line]
            assert read
            assert [line for line in read if "start_at=?" not in line or "tenant_id=?" not in line] == [], wanted


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("columns", "bucket", "days"), WIDE)
async def test_a_page_of_a_few_tenants_or_keys_is_read_without_others_however_wide_it_is(
    database: Database, columns: tuple[str, ...], bucket: str, days: int
) -> None:
    segments = cover(START, START + timedelta(days=days), bucket, BillingCalendar("Europe/Berlin"))
    for wanted in FEW:
        owners = Owners(columns=columns, wanted=wanted)
        for after in (None, place_of(owners)):
            read = [line for line in await lines_of(database, page(segments, owners, after)) if "usage_rollups" in line]
            assert read
            assert [line for line in read if "tenant_id=?" not in line] == [], (wanted, after)


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_postgresql_reads_for_a_page_of_a_few_tenants_or_keys_hardly_any_sums_of_others(
    database: Database, cast: Cast
) -> None:
    await write_hours(database, cast)
    segments = cover(FIRST_HOUR, FIRST_HOUR + timedelta(hours=HOURS), "hour", BillingCalendar())
    bob, charlie = cast.bob, cast.charlie
    few = [{"tenant_id": {bob.tenant.id}}, {"tenant_id": {bob.tenant.id, charlie.tenant.id}}]
    few += [{"key_id": {bob.key.id}}, {"key_id": {bob.key.id, charlie.key.id}}]
    async with database.reading() as connection:
        for columns in GROUPINGS:
            for wanted in few:
                owners = Owners(columns=columns, wanted=wanted)
                after = Place(FIRST_HOUR + timedelta(hours=3), (*("" for _ in owners.place), "EUR"))
                for query in (page(segments, owners, None), page(segments, owners, after)):
                    compiled = query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
                    explained = text("EXPLAIN (ANALYZE, FORMAT JSON) " + str(compiled).replace(":", r"\:"))
                    (told,) = (await connection.execute(explained)).scalar_one()
                    assert 0 < rows_read(told["Plan"]) <= 8 * OWN_SUMS, (columns, wanted)


async def write_hours(database: Database, cast: Cast) -> None:
    """Write the sums of HOURS hours: in the first OWN_SUMS of them Bob and Charlie used something, in each one many others."""
    others = text(
        "INSERT INTO usage_rollups SELECT 'hour', :first + make_interval(hours => hour), 'tn_' || number, 'key_' || number, "
        "'demo', 'EUR', 1, 1, 1, 1, 1, 1, 1 FROM generate_series(0, :hours - 1) AS hour, generate_series(1, :others) AS number"
    )
    persons = [{"tenant_id": person.tenant.id, "key_id": person.key.id} for person in (cast.bob, cast.charlie)]
    used = {"bucket": "hour", "model": "demo", "currency": "EUR", **dict.fromkeys(COUNTS, 1)}
    own = [{**used, **person, "start_at": FIRST_HOUR + timedelta(hours=hour)} for hour in range(OWN_SUMS) for person in persons]
    async with database.writing() as connection:
        await connection.execute(others, {"first": FIRST_HOUR, "hours": HOURS, "others": OTHERS})
        await connection.execute(insert(usage_rollups), own)
        await connection.execute(text("ANALYZE"))


def rows_read(plan: dict[str, Any]) -> int:
    """Return how many sums a plan of PostgreSQL looked at."""
    read = 0
    if plan.get("Relation Name") == "usage_rollups":
        read = int(plan["Actual Loops"] * (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)))
    return read + sum(map(rows_read, plan.get("Plans", ())))


def test_totals_are_sorted_by_what_was_asked_for_alone() -> None:
    segments = cover(START, START + timedelta(days=30), "day", BillingCalendar("Europe/Berlin"))
    for columns in GROUPINGS:
        query = str(totals_query(segments, Owners(columns=columns, wanted={})))
        grouped = re.findall(r"GROUP BY ((?:\w+\.\w+(?:, )?)+)", query)
        assert len(grouped) == len(segments) + 1
        for names in grouped:
            assert [name.partition(".")[2] for name in names.split(", ")] == [*columns, "currency"]


async def test_totals_begin_with_the_dearest_be_it_one_dear_request_or_many_cheap_ones(database: Database) -> None:
    costs = {
        "tn_dear": [(1, SPLIT // 10)],
        "tn_cheap": [(0, SPLIT - 1)] * 3,
        "tn_huge": [(SPLIT * 20, 0)],
        "tn_paid_back": [(0, -1)],
    }
    used = {"bucket": "hour", "key_id": "key_1", "model": "demo", "currency": "EUR", **dict.fromkeys(COUNTS, 1)}
    rows = [
        {**used, "tenant_id": tenant, "start_at": FIRST_HOUR + timedelta(hours=hour), "cost_high": high, "cost_low": low}
        for tenant, parts in costs.items()
        for hour, (high, low) in enumerate(parts)
    ]
    segments = cover(FIRST_HOUR, FIRST_HOUR + timedelta(hours=5), "hour", BillingCalendar())
    async with database.writing() as connection:
        await connection.execute(insert(usage_rollups), rows)
    async with database.reading() as connection:
        found = (await connection.execute(totals_query(segments, Owners(columns=("tenant_id",), wanted={})))).all()
    assert [row.tenant_id for row in found] == ["tn_huge", "tn_cheap", "tn_dear", "tn_paid_back"]


def test_segments_name_where_their_sums_begin_unless_they_are_too_many() -> None:
    calendar = BillingCalendar("Europe/Berlin")
    for days, bucket in ((3, "day"), (STARTS_MAX, "day"), (STARTS_MAX + 2, "day"), (4, "hour"), (5, "hour"), (1, "minute")):
        for segment in cover(START, START + timedelta(days=days), bucket, calendar):
            moments = [segment.start]
            while segment.level != "event" and moments[-1] < segment.end:
                moments.append(bucket_end(moments[-1], segment.level, calendar))
            known = segment.level != "event" and len(moments) - 1 <= STARTS_MAX
            assert list(segment.starts) == (moments[:-1] if known else [])


def test_many_keys_of_nobody_knows_how_many_tenants_are_not_looked_for_one_by_one() -> None:
    few, many = ({f"key_{number}" for number in range(count)} for count in (10, 200))
    assert Owners(columns=(), wanted={}).probes > PROBES_MAX
    assert Owners(columns=(), wanted={"key_id": few}).probes == 100
    assert Owners(columns=(), wanted={"tenant_id": few, "key_id": many}).probes == 2000
    assert Owners(columns=(), wanted={"tenant_id": few}).probes == 10
    assert Owners(columns=(), wanted={"key_id": many}).probes > PROBES_MAX


def test_segments_reach_into_a_bucket_that_they_lie_in_or_before() -> None:
    calendar = BillingCalendar("Europe/Berlin")
    segments = cover(START, START + timedelta(days=3), "day", calendar)
    assert [segment.level for segment in segments] == ["event", "minute", "hour", "day", "hour", "minute", "event"]
    for number, level in ((0, "event"), (1, "day"), (2, "day"), (3, "hour")):
        bucket_at = bucket_start(START + timedelta(days=number), "day", calendar)
        assert reaching(segments, bucket_at)[0].level == level
    assert reaching(segments, START + timedelta(days=4)) == []
