"""What SQLite reads for a page of a report: from one place to another, never a table from its beginning."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest
from sqlalchemy import Select, text
from sqlalchemy.dialects import sqlite

from appliance.base.db import Database
from appliance.metering.calendar import BillingCalendar
from appliance.metering.usage_cover import STARTS_MAX, bucket_end, bucket_start, cover, reaching
from appliance.metering.usage_queries import OWNER, PROBES_MAX, Owners, Place, page_query, report_query, totals_query

START = datetime(2026, 10, 24, 9, 41, 12, 345, tzinfo=UTC)
GROUPINGS = [columns for size in range(len(OWNER) + 1) for columns in combinations(OWNER, size)]
NARROWED = [{}, {"tenant_id": {"tn_1"}}, {"key_id": {"key_1"}}, {"model": {"demo"}}, {"tenant_id": {"tn_1", "tn_2"}}]
NARROWED += [{"key_id": {"key_1", "key_2"}}, {"tenant_id": {"tn_1", "tn_2"}, "key_id": {"key_1", "key_2"}}]


async def plan(database: Database, owners: Owners, after: Place | None) -> list[str]:
    """Return the lines of SQLite's plan for a page of a report over five days by hour."""
    segments = cover(START, START + timedelta(days=5), "hour", BillingCalendar("Europe/Berlin"))
    query = page_query(segments if after is None else reaching(segments, after.start_at), owners, 51, after)
    return await lines_of(database, query)


async def lines_of(database: Database, query: Select[Any]) -> list[str]:
    """Return the lines of SQLite's plan for a query."""
    compiled = query.compile(dialect=sqlite.dialect(), compile_kwargs={"literal_binds": True})
    async with database.reading() as connection:
        rows = (await connection.execute(text("EXPLAIN QUERY PLAN " + str(compiled).replace(":", r"\:")))).all()
    return [str(row[3]) for row in rows]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("columns", GROUPINGS, ids=lambda columns: "+".join(columns) or "nothing")
async def test_a_page_reads_the_sums_and_events_of_its_places_alone(database: Database, columns: tuple[str, ...]) -> None:
    for wanted in NARROWED:
        owners = Owners(columns=columns, wanted=wanted)
        place = Place(START.replace(minute=0) + timedelta(hours=30), (*(f"{name}_1" for name in owners.place), "EUR"))
        for after in (None, place):
            read = [line for line in await plan(database, owners, after) if "usage_" in line]
            assert read
            assert [line for line in read if not line.startswith("SEARCH")] == [], (wanted, after)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("columns", GROUPINGS, ids=lambda columns: "+".join(columns) or "nothing")
async def test_days_of_a_few_tenants_or_keys_are_read_without_those_of_others(
    database: Database, columns: tuple[str, ...]
) -> None:
    segments = cover(START, START + timedelta(days=30), "day", BillingCalendar("Europe/Berlin"))
    for wanted in NARROWED:
        if not {"tenant_id", "key_id"} & set(wanted):
            continue
        owners = Owners(columns=columns, wanted=wanted)
        for query in (page_query(segments, owners, 51, None), report_query(segments, owners), totals_query(segments, owners)):
            read = [line for line in await lines_of(database, query) if "usage_rollups" in line]
            assert read
            assert [line for line in read if "start_at=?" not in line or "tenant_id=?" not in line] == [], wanted


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
