"""What SQLite reads for a page of a report: from one place to another, never a table from its beginning."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import combinations

import pytest
from sqlalchemy import text
from sqlalchemy.dialects import sqlite

from appliance.base.db import Database
from appliance.metering.calendar import BillingCalendar
from appliance.metering.usage_cover import bucket_start, cover, reaching
from appliance.metering.usage_queries import OWNER, Owners, Place, page_query

START = datetime(2026, 10, 24, 9, 41, 12, 345, tzinfo=UTC)
GROUPINGS = [columns for size in range(len(OWNER) + 1) for columns in combinations(OWNER, size)]
NARROWED = [{}, {"tenant_id": {"tn_1"}}, {"key_id": {"key_1"}}, {"model": {"demo"}}, {"tenant_id": {"tn_1", "tn_2"}}]


async def plan(database: Database, owners: Owners, after: Place | None) -> list[str]:
    """Return the lines of SQLite's plan for a page of a report over five days by hour."""
    segments = cover(START, START + timedelta(days=5), "hour", BillingCalendar("Europe/Berlin"))
    query = page_query(segments if after is None else reaching(segments, after.start_at), owners, 51, after)
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


def test_segments_reach_into_a_bucket_that_they_lie_in_or_before() -> None:
    calendar = BillingCalendar("Europe/Berlin")
    segments = cover(START, START + timedelta(days=3), "day", calendar)
    assert [segment.level for segment in segments] == ["event", "minute", "hour", "day", "hour", "minute", "event"]
    for number, level in ((0, "event"), (1, "day"), (2, "day"), (3, "hour")):
        bucket_at = bucket_start(START + timedelta(days=number), "day", calendar)
        assert reaching(segments, bucket_at)[0].level == level
    assert reaching(segments, START + timedelta(days=4)) == []
