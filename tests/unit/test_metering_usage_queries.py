"""Queries of usage reports read only index ranges of the owners concerned; their results, segments and order."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest
from sqlalchemy import Select, insert, text

from appliance.base.db import Database
from appliance.base.tables import usage_appliance_rollups, usage_rollups
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.rollups import COUNTS, SPLIT
from appliance.metering.usage_queries import (
    OWNER_COLUMNS,
    OWNERS_MAX,
    PROBES_MAX,
    Measure,
    ReportScope,
    RowKey,
    page_query,
    report_query,
    totals_query,
)
from appliance.metering.usage_segments import (
    EARLIEST,
    LATEST,
    STARTS_MAX,
    Segment,
    bucket_end,
    bucket_start,
    segments_from,
    split_period,
)
from appliance.tenancy.keys import Keys
from tests.support.cast import OWNER, PEPPER, Cast
from tests.support.clock import FakeClock
from tests.support.query_plans import query_plan

START = datetime(2026, 10, 24, 9, 41, 12, 345, tzinfo=UTC)
FIRST_HOUR = START.replace(minute=0, second=0, microsecond=0)
HOURS, OTHERS, OWN_SUMS = 120, 200, 10
GROUPINGS = [columns for size in range(len(OWNER_COLUMNS) + 1) for columns in combinations(OWNER_COLUMNS, size)]
BUCKETS = [("minute", 3), ("hour", 30), ("day", 400)]
WIDE = [(columns, *BUCKETS[number % len(BUCKETS)]) for number, columns in enumerate(GROUPINGS)]
NARROWED = [{}, {"tenant_id": {"tn_1"}}, {"key_id": {"key_1"}}, {"model": {"demo"}}, {"tenant_id": {"tn_1", "tn_2"}}]
NARROWED += [{"key_id": {"key_1", "key_2"}}, {"tenant_id": {"tn_1", "tn_2"}, "key_id": {"key_1", "key_2"}}]
FEW = [filters for filters in NARROWED if {"tenant_id", "key_id"} & set(filters)]


def page(segments: Sequence[Segment], scope: ReportScope, after: RowKey | None) -> Select[Any]:
    """Return the query for 50 rows and one more."""
    return page_query(segments if after is None else segments_from(segments, after.start_at), scope, 51, after)


def row_key_of(scope: ReportScope) -> RowKey:
    """Return the key of a row in the second day of the report."""
    return RowKey(START.replace(minute=0) + timedelta(hours=30), (*(f"{name}_1" for name in scope.key_columns), "EUR"))


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("columns", GROUPINGS, ids=lambda columns: "+".join(columns) or "nothing")
async def test_a_page_reads_only_its_own_index_ranges(database: Database, columns: tuple[str, ...]) -> None:
    segments = split_period(START, START + timedelta(days=5), "hour", BillingCalendar("Europe/Berlin"))
    for filters in NARROWED:
        scope = ReportScope(columns=columns, filters=filters)
        for after in (None, row_key_of(scope)):
            read = await query_plan(database, page(segments, scope, after), "usage_")
            assert read
            assert [line for line in read if not line.startswith("SEARCH")] == [], (filters, after)


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize("columns", GROUPINGS, ids=lambda columns: "+".join(columns) or "nothing")
async def test_days_of_a_few_owners_are_read_without_rows_of_others(database: Database, columns: tuple[str, ...]) -> None:
    segments = split_period(START, START + timedelta(days=30), "day", BillingCalendar("Europe/Berlin"))
    for filters in FEW:
        scope = ReportScope(columns=columns, filters=filters)
        for query in (page_query(segments, scope, 51, None), report_query(segments, scope), totals_query(segments, scope)):
            read = await query_plan(database, query, "usage_rollups")
            assert read
            assert [line for line in read if "start_at=?" not in line or "tenant_id=?" not in line] == [], filters


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("columns", "bucket", "days"), WIDE)
async def test_a_page_of_a_few_owners_over_any_period_is_read_without_rows_of_others(
    database: Database, columns: tuple[str, ...], bucket: str, days: int
) -> None:
    segments = split_period(START, START + timedelta(days=days), bucket, BillingCalendar("Europe/Berlin"))
    for filters in FEW:
        scope = ReportScope(columns=columns, filters=filters)
        for after in (None, row_key_of(scope)):
            read = await query_plan(database, page(segments, scope, after), "usage_rollups")
            assert read
            assert [line for line in read if "tenant_id=?" not in line] == [], (filters, after)


@pytest.mark.postgres
@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_postgresql_reads_hardly_any_rows_of_others_for_a_page_of_a_few_owners(database: Database, cast: Cast) -> None:
    await write_hours(database, cast)
    segments = split_period(FIRST_HOUR, FIRST_HOUR + timedelta(hours=HOURS), "hour", BillingCalendar())
    bob, charlie = cast.bob, cast.charlie
    few = [{"tenant_id": {bob.tenant.id}}, {"tenant_id": {bob.tenant.id, charlie.tenant.id}}]
    few += [{"key_id": {bob.key.id}}, {"key_id": {bob.key.id, charlie.key.id}}]
    async with database.reading() as connection:
        for columns in GROUPINGS:
            for filters in few:
                scope = ReportScope(columns=columns, filters=filters)
                after = RowKey(FIRST_HOUR + timedelta(hours=3), (*("" for _ in scope.key_columns), "EUR"))
                for query in (page(segments, scope, None), page(segments, scope, after)):
                    compiled = query.compile(dialect=connection.dialect, compile_kwargs={"literal_binds": True})
                    explained = text("EXPLAIN (ANALYZE, FORMAT JSON) " + str(compiled).replace(":", r"\:"))
                    (explanation,) = (await connection.execute(explained)).scalar_one()
                    assert 0 < rows_read(explanation["Plan"]) <= 8 * OWN_SUMS, (columns, filters)


async def write_hours(database: Database, cast: Cast) -> None:
    """Write sums of HOURS hours: Bob's and Charlie's for the first OWN_SUMS, those of OTHERS other tenants for all."""
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
    """Return how many rows of sums an executed plan of PostgreSQL read."""
    read = 0
    if plan.get("Relation Name") == "usage_rollups":
        read = int(plan["Actual Loops"] * (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)))
    return read + sum(map(rows_read, plan.get("Plans", ())))


async def test_a_report_on_more_keys_than_are_probed_singly_has_exactly_these_keys(
    database: Database, clock: FakeClock, cast: Cast
) -> None:
    keys = Keys(database, clock, PEPPER)
    made = [(await keys.create(cast.bob.tenant.id, name=f"key {number}", access=OWNER))[0] for number in range(OWNERS_MAX)]
    requested = {*(key.id for key in made), cast.charlie.key.id}
    persons = [(cast.bob.tenant.id, key.id) for key in (*made, cast.bob.key)]
    persons += [(cast.charlie.tenant.id, cast.charlie.key.id), ("tn_of_nobody", "key_of_nobody")]
    used = {"bucket": "hour", "model": "demo", "currency": "EUR", **dict.fromkeys(COUNTS, 1)}
    rows = [
        {**used, "tenant_id": tenant_id, "key_id": key_id, "start_at": FIRST_HOUR + timedelta(hours=hour)}
        for tenant_id, key_id in persons
        for hour in range(3)
    ]
    async with database.writing() as connection:
        await connection.execute(insert(usage_rollups), rows)
    segments = split_period(FIRST_HOUR, FIRST_HOUR + timedelta(hours=3), "hour", BillingCalendar())
    scope = ReportScope(columns=("key_id",), filters={"key_id": requested})
    assert len(requested) > OWNERS_MAX
    async with database.reading() as connection:
        whole = (await connection.execute(report_query(segments, scope))).all()
        totals = (await connection.execute(totals_query(segments, scope))).all()
        first = (await connection.execute(page_query(segments, scope, 40, None))).all()
        last = RowKey(first[-1].start_at, (first[-1].tenant_id, first[-1].key_id, "EUR"))
        second = (await connection.execute(page_query(segments_from(segments, last.start_at), scope, 40, last))).all()
    assert Counter(row.key_id for row in whole) == dict.fromkeys(requested, 3)
    assert {row.key_id: row.requests for row in totals} == dict.fromkeys(requested, 3)
    assert [*first, *second] == whole


@pytest.mark.parametrize("few", ["tenant_id", "key_id"])
async def test_hours_with_usage_of_other_models_only_take_no_row_of_a_page(database: Database, cast: Cast, few: str) -> None:
    owner = {"tenant_id": cast.bob.tenant.id, "key_id": cast.bob.key.id}
    used = {**owner, "bucket": "hour", "currency": "EUR", **dict.fromkeys(COUNTS, 1)}
    rows = [
        {**used, "model": "other" if hour < 10 else "demo", "start_at": FIRST_HOUR + timedelta(hours=hour)}
        for hour in range(12)
    ]
    segments = split_period(FIRST_HOUR, FIRST_HOUR + timedelta(hours=12), "hour", BillingCalendar())
    query = page_query(segments, ReportScope(columns=(), filters={few: {owner[few]}, "model": {"demo"}}), 2, None)
    async with database.writing() as connection:
        await connection.execute(insert(usage_rollups), rows)
    async with database.reading() as connection:
        found = (await connection.execute(query)).all()
    assert [(row.start_at - FIRST_HOUR) // timedelta(hours=1) for row in found] == [10, 11]


@pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
async def test_sums_of_many_keys_are_read_by_their_tenants(database: Database) -> None:
    segments = split_period(START, START + timedelta(days=30), "day", BillingCalendar("Europe/Berlin"))
    scope = ReportScope(columns=("key_id",), filters={"key_id": {f"key_{number}" for number in range(OWNERS_MAX + 1)}})
    for query in (report_query(segments, scope), totals_query(segments, scope), page_query(segments, scope, 51, None)):
        lines = await query_plan(database, query, "")
        assert any("api_keys" in line for line in lines)
        assert [line for line in lines if "usage_rollups" in line and "tenant_id=?" not in line] == []


def test_a_report_without_tenants_or_keys_reads_the_sums_of_the_appliance() -> None:
    for columns in GROUPINGS:
        for filters in NARROWED:
            by_model_alone = {*columns, *filters} <= {"model"}
            assert ReportScope(columns=columns, filters=filters).table is (
                usage_appliance_rollups if by_model_alone else usage_rollups
            )


def test_rows_are_sorted_explicitly_by_start_owner_and_currency() -> None:
    segments = split_period(START, START + timedelta(days=30), "day", BillingCalendar("Europe/Berlin"))
    for columns in GROUPINGS:
        scope = ReportScope(columns=columns, filters={})
        names = ", ".join(f"parts.{name}" for name in ("start_at", *scope.key_columns, "currency"))
        for query in (report_query(segments, scope), page_query(segments, scope, 51, row_key_of(scope))):
            assert re.search(rf"ORDER BY {names}(\s+LIMIT .*)?$", str(query).replace("\n", " ")), columns


def test_totals_are_grouped_only_by_the_requested_columns() -> None:
    segments = split_period(START, START + timedelta(days=30), "day", BillingCalendar("Europe/Berlin"))
    for columns in GROUPINGS:
        query = str(totals_query(segments, ReportScope(columns=columns, filters={})))
        grouped = re.findall(r"GROUP BY ((?:\w+\.\w+(?:, )?)+)", query)
        assert len(grouped) == len(segments) + 1
        for names in grouped:
            assert [name.partition(".")[2] for name in names.split(", ")] == [*columns, "currency"]


async def test_totals_are_sorted_by_cost_across_both_halves_of_the_amount(database: Database) -> None:
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
    segments = split_period(FIRST_HOUR, FIRST_HOUR + timedelta(hours=5), "hour", BillingCalendar())
    async with database.writing() as connection:
        await connection.execute(insert(usage_rollups), rows)
    async with database.reading() as connection:
        found = (await connection.execute(totals_query(segments, ReportScope(columns=("tenant_id",), filters={})))).all()
    assert [row.tenant_id for row in found] == ["tn_huge", "tn_cheap", "tn_dear", "tn_paid_back"]


async def test_totals_are_sorted_by_a_measure_and_costs_in_the_given_currency_first(
    database: Database,
) -> None:
    rows = [
        {
            **dict.fromkeys(COUNTS, 0),
            "bucket": "hour",
            "start_at": FIRST_HOUR,
            "key_id": "key_1",
            "model": "demo",
            "tenant_id": tenant,
            "currency": currency,
            "requests": requests,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "cost_low": cost,
        }
        for tenant, currency, requests, prompt, completion, cost in (
            ("tn_yen", "JPY", 2, 10, 10, 900),
            ("tn_franc", "CHF", 1, 1, 1, 3),
            ("tn_euro", "EUR", 1, 50, 1, 2),
            ("tn_many", "EUR", 3, 1, 5, 1),
        )
    ]
    segments = split_period(FIRST_HOUR, FIRST_HOUR + timedelta(hours=5), "hour", BillingCalendar())
    scope = ReportScope(columns=("tenant_id",), filters={})
    async with database.writing() as connection:
        await connection.execute(insert(usage_rollups), rows)

    found: dict[str, list[str]] = {}
    measures: tuple[Measure, ...] = ("cost", "tokens", "requests")
    for measure in measures:
        query = totals_query(segments, scope, measure=measure, currency="EUR")
        async with database.reading() as connection:
            found[measure] = [row.tenant_id for row in (await connection.execute(query)).all()]

    assert found == {
        "cost": ["tn_euro", "tn_many", "tn_franc", "tn_yen"],
        "tokens": ["tn_euro", "tn_yen", "tn_many", "tn_franc"],
        "requests": ["tn_many", "tn_yen", "tn_euro", "tn_franc"],
    }


def test_segments_list_the_starts_of_their_sums_up_to_a_limit() -> None:
    calendar = BillingCalendar("Europe/Berlin")
    for days, bucket in ((3, "day"), (STARTS_MAX, "day"), (STARTS_MAX + 2, "day"), (4, "hour"), (5, "hour"), (1, "minute")):
        for segment in split_period(START, START + timedelta(days=days), bucket, calendar):
            moments = [segment.start]
            while segment.level != "event" and moments[-1] < segment.end:
                moments.append(bucket_end(moments[-1], segment.level, calendar))
            known = segment.level != "event" and len(moments) - 1 <= STARTS_MAX
            assert list(segment.starts) == (moments[:-1] if known else [])


async def test_totals_of_equal_cost_are_sorted_by_tokens_and_then_by_name(database: Database) -> None:
    used = {"bucket": "hour", "key_id": "key_1", "model": "demo", "currency": "EUR", **dict.fromkeys(COUNTS, 1)}
    completion = {"tn_small": 3, "tn_b": 9, "tn_a": 9, "tn_c": 9, "tn_large": 20}
    rows = [
        {**used, "tenant_id": tenant, "start_at": FIRST_HOUR, "completion_tokens": tokens}
        for tenant, tokens in completion.items()
    ]
    segments = split_period(FIRST_HOUR, FIRST_HOUR + timedelta(hours=1), "hour", BillingCalendar())
    async with database.writing() as connection:
        await connection.execute(insert(usage_rollups), rows)
    async with database.reading() as connection:
        found = (await connection.execute(totals_query(segments, ReportScope(columns=("tenant_id",), filters={})))).all()
    assert [row.tenant_id for row in found] == ["tn_large", "tn_a", "tn_b", "tn_c", "tn_small"]


@pytest.mark.parametrize("bucket", ["minute", "hour", "day"])
def test_segments_are_contiguous_and_each_is_within_a_bucket_or_spans_whole_buckets(bucket: str) -> None:
    calendar, draw, tick = BillingCalendar("Europe/Berlin"), random.Random(5), timedelta(microseconds=1)
    for _ in range(300):
        start = START + timedelta(seconds=draw.choice([0, 60 * draw.randrange(3000), draw.random() * 3e5]))
        edge = bucket_start(start, draw.choice(["minute", "hour", "day"]), calendar)
        start = draw.choice([start, edge, edge - tick])
        end = start + draw.choice([tick, timedelta(seconds=draw.random() * 4e5), timedelta(minutes=draw.randrange(1, 200))])
        segments = split_period(start, end, bucket, calendar)
        ends = [start, *(segment.end for segment in segments)]
        assert [segment.start for segment in segments] == ends[:-1]
        assert ends[-1] == end
        for segment in segments:
            assert segment.start < segment.end
            if segment.level == bucket:
                assert segment.report_bucket is None
                assert [bucket_start(edge, bucket, calendar) for edge in (segment.start, segment.end)] == [
                    segment.start,
                    segment.end,
                ]
            else:
                assert segment.report_bucket == bucket_start(segment.start, bucket, calendar)
                assert segment.report_bucket == bucket_start(segment.end - tick, bucket, calendar)


def test_segments_stay_within_the_range_of_the_calendar() -> None:
    segments = split_period(datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC), "day", BillingCalendar())
    assert [(segment.level, segment.start, segment.end) for segment in segments] == [("day", EARLIEST, LATEST)]


def test_the_starts_of_a_segment_are_listed_up_to_the_statement_limit() -> None:
    midnight = datetime(2026, 6, 1, tzinfo=UTC)
    for days in (STARTS_MAX - 1, STARTS_MAX, STARTS_MAX + 1):
        (segment,) = split_period(midnight, midnight + timedelta(days=days), "day", BillingCalendar())
        assert len(segment.starts) == (days if days <= STARTS_MAX else 0)


def test_rows_by_key_are_ordered_by_tenant_first_and_others_by_their_columns() -> None:
    for columns in GROUPINGS:
        shown = {"tenant_id", *columns} if "key_id" in columns else set(columns)
        assert ReportScope(columns=columns, filters={}).key_columns == tuple(name for name in OWNER_COLUMNS if name in shown)


def test_many_keys_of_unknown_tenants_are_not_probed_singly() -> None:
    few, many = ({f"key_{number}" for number in range(count)} for count in (10, 200))
    assert ReportScope(columns=(), filters={}).index_probes > PROBES_MAX
    assert ReportScope(columns=(), filters={"key_id": few}).index_probes == 100
    assert ReportScope(columns=(), filters={"tenant_id": few, "key_id": many}).index_probes == 2000
    assert ReportScope(columns=(), filters={"tenant_id": few}).index_probes == 10
    assert ReportScope(columns=(), filters={"key_id": many}).index_probes > PROBES_MAX


def test_segments_from_a_bucket_begin_with_the_one_that_contains_it() -> None:
    calendar = BillingCalendar("Europe/Berlin")
    segments = split_period(START, START + timedelta(days=3), "day", calendar)
    assert [segment.level for segment in segments] == ["event", "minute", "hour", "day", "hour", "minute", "event"]
    for number, level in ((0, "event"), (1, "day"), (2, "day"), (3, "hour")):
        bucket_at = bucket_start(START + timedelta(days=number), "day", calendar)
        assert segments_from(segments, bucket_at)[0].level == level
    assert segments_from(segments, START + timedelta(days=4)) == []
