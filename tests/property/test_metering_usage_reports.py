"""Reports equal the sum of the events, in every bucket and grouping, on both databases."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import combinations
from typing import Any

import pytest
from sqlalchemy import Select, insert

from appliance.base.acting import SYSTEM
from appliance.base.db import Database
from appliance.base.errors import InvalidValue
from appliance.base.tables import usage_events
from appliance.metering import usage
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.records import BILLED, UsageEvent
from appliance.metering.usage import GROUPS, UsageFilter, UsageReports
from appliance.tenancy.access import Access
from appliance.tenancy.keys import Keys
from appliance.tenancy.pages import Page
from appliance.tenancy.roles import Role, TenantRole
from tests.support.cast import OWNER, PEPPER, Cast
from tests.support.clock import START, FakeClock
from tests.support.ledgers import all_events

BUCKET_S = {"minute": 60, "hour": 3600, "day": 86400}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
EDGES_US = (0, 1, 59_999_999, 60_000_000, 3_599_999_999, 3_600_000_000, 43_199_999_999, 43_200_000_000, 86_400_000_000)


@pytest.fixture
async def events(database: Database, clock: FakeClock, cast: Cast) -> list[UsageEvent]:
    """300 events over two days, some at the very edges of buckets, some of them not to be counted."""
    chance = random.Random(7)
    second_key, _secret = await Keys(database, clock, PEPPER).create(cast.bob.tenant.id, name="second", access=OWNER)
    owners = [(cast.bob.tenant.id, cast.bob.key.id), (cast.bob.tenant.id, second_key.id)]
    owners.append((cast.charlie.tenant.id, cast.charlie.key.id))
    rows = []
    for number in range(300):
        tenant_id, key_id = chance.choice(owners)
        offset_us = chance.choice(EDGES_US) if number % 3 else chance.randrange(2 * 86_400_000_000)
        admitted_at = START - timedelta(hours=12) + timedelta(microseconds=offset_us)
        prompt = chance.randrange(1000)
        rows.append(
            {
                "request_id": f"req_{number}",
                "tenant_id": tenant_id,
                "key_id": key_id,
                "epoch_id": cast.epoch_id,
                "model": chance.choice(["demo", "other"]),
                "endpoint": "/v1/completions",
                "kind": "usage" if number % 10 else "adjustment",
                "status": chance.choice(["posted", "posted", "recovered", "voided", "pending"]),
                "reserved_tokens": 0,
                "prompt_tokens": prompt,
                "cached_tokens": chance.randrange(prompt + 1),
                "completion_tokens": chance.randrange(1000),
                "estimated": False,
                "cost_picos": chance.randrange(-(2**62), 2**63) if number % 10 == 0 else chance.randrange(2**62, 2**63),
                "currency": "EUR" if number % 7 else "USD",
                "billing_day": admitted_at.date(),
                "admitted_at": admitted_at,
            }
        )
    async with database.writing() as connection:
        await connection.execute(insert(usage_events), rows)
    await rollups.rebuild(database, BillingCalendar())
    return await all_events(database)


def _expected(events: list[UsageEvent], bucket_s: int, groups: tuple[str, ...]) -> dict[tuple[object, ...], list[int]]:
    """Return the sums as plainly as they can be made."""
    sums: dict[tuple[object, ...], list[int]] = defaultdict(lambda: [0] * 5)
    for event in events:
        if event.status not in ("posted", "recovered"):
            continue
        bucket = EPOCH + timedelta(seconds=(event.admitted_at - EPOCH) // timedelta(seconds=bucket_s) * bucket_s)
        names = {"tenant": event.tenant_id, "key": event.key_id, "model": event.model}
        row = sums[(bucket, *(names[name] if name in groups else None for name in GROUPS), event.currency)]
        counts = (event.kind == "usage", event.prompt_tokens, event.cached_tokens, event.completion_tokens, event.cost_picos)
        for index, count in enumerate(counts):
            row[index] += count
    return dict(sums)


async def test_every_bucket_and_grouping_equals_the_plain_sum(database: Database, events: list[UsageEvent]) -> None:
    reports = UsageReports(database, calendar=BillingCalendar())
    for bucket, bucket_s in BUCKET_S.items():
        for size in range(len(GROUPS) + 1):
            for groups in combinations(GROUPS, size):
                rows = await reports.usage(START - timedelta(days=1), START + timedelta(days=3), bucket, groups, access=OWNER)
                found = {
                    (row.start, row.tenant_id, row.key_id, row.model, row.currency): [
                        row.requests,
                        row.prompt_tokens,
                        row.cached_tokens,
                        row.completion_tokens,
                        row.cost_picos,
                    ]
                    for row in rows
                }
                assert len(found) == len(rows)
                assert found == _expected(events, bucket_s, groups)
                assert all(row.end - row.start == timedelta(seconds=bucket_s) for row in rows)


async def test_a_period_includes_its_start_and_excludes_its_end(database: Database, events: list[UsageEvent]) -> None:
    midnight = START - timedelta(hours=12)
    rows = await UsageReports(database, calendar=BillingCalendar()).usage(
        midnight, midnight + timedelta(minutes=1), "minute", access=OWNER
    )
    inside = [event for event in events if midnight <= event.admitted_at < midnight + timedelta(minutes=1)]
    settled = [event for event in inside if event.status in ("posted", "recovered")]
    assert sum(row.cost_picos for row in rows) == sum(event.cost_picos for event in settled)
    assert {row.start for row in rows} == {midnight}


async def test_a_report_filtered_by_tenant_has_only_its_sums(database: Database, cast: Cast, events: list[UsageEvent]) -> None:
    reports, bobs_usage = UsageReports(database, calendar=BillingCalendar()), UsageFilter(tenant_ids=[cast.bob.tenant.id])
    rows = await reports.usage(
        START - timedelta(days=1), START + timedelta(days=3), "day", ["tenant"], bobs_usage, access=OWNER
    )
    assert {row.tenant_id for row in rows} == {cast.bob.tenant.id}
    bobs = [event for event in events if event.tenant_id == cast.bob.tenant.id]
    assert sum(row.prompt_tokens for row in rows) == sum(
        event.prompt_tokens for event in bobs if event.status in ("posted", "recovered")
    )


async def test_a_member_sees_no_sums_of_other_tenants_with_any_filter(
    database: Database, cast: Cast, events: list[UsageEvent]
) -> None:
    reports, bob, charlie = UsageReports(database, calendar=BillingCalendar()), cast.bob, cast.charlie
    mine = Access(role=Role.MEMBER, actor=SYSTEM, tenants={bob.tenant.id: TenantRole.VIEWER})
    asked = [None, UsageFilter(tenant_ids=[bob.tenant.id, charlie.tenant.id]), UsageFilter(models=["demo", "other"])]
    asked += [UsageFilter(key_ids=[charlie.key.id]), UsageFilter(tenant_ids=[charlie.tenant.id])]
    start, end = START - timedelta(days=1), START + timedelta(days=3)
    for number, filters in enumerate(asked):
        sums = await reports.totals(start, end, ["tenant"], filters, access=mine)
        rows = await reports.usage(start, end, "day", ["tenant"], filters, access=mine)
        assert {row.tenant_id for row in (*sums, *rows)} == ({bob.tenant.id} if number < 3 else set())


async def test_a_period_before_all_sums_is_empty(database: Database) -> None:
    reports, start, end = UsageReports(database, calendar=BillingCalendar()), EPOCH - timedelta(days=2), EPOCH
    assert await reports.usage(start, end, access=OWNER) == await reports.totals(start, end, access=OWNER) == []
    assert await reports.usage_page(start, end, access=OWNER) == Page(data=[], next_cursor=None)


async def test_a_whole_report_is_limited_in_rows_and_a_part_has_its_first_rows(
    database: Database, events: list[UsageEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = UsageReports(database, calendar=BillingCalendar())
    question: tuple[datetime, datetime, str] = (START - timedelta(days=1), START + timedelta(days=3), "day")
    rows = await reports.usage(*question, access=OWNER)
    monkeypatch.setattr(usage, "USAGE_ROWS_MAX", len(rows))
    assert await reports.usage(*question, access=OWNER) == rows

    monkeypatch.setattr(usage, "USAGE_ROWS_MAX", len(rows) - 1)
    with pytest.raises(InvalidValue, match="larger bucket") as refused:
        await reports.usage(*question, access=OWNER)
    assert refused.value.param == "bucket"
    assert await reports.usage(*question, rows_max=len(rows) - 1, access=OWNER) == rows[:-1]


async def test_a_report_that_is_too_long_reads_hardly_more_rows_than_the_limit(
    database: Database, events: list[UsageEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    reports, period = UsageReports(database, calendar=BillingCalendar()), (START - timedelta(days=1), START + timedelta(days=3))
    read, read_rows = reports._read, list[int]()

    async def counted(query: Select[Any], build: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
        def counting(rows: Sequence[Any]) -> list[Any]:
            read_rows.append(len(rows))
            return build(rows)

        return await read(query, counting)

    monkeypatch.setattr(reports, "_read", counted)
    monkeypatch.setattr(usage, "USAGE_ROWS_MAX", 3)
    with pytest.raises(InvalidValue):
        await reports.usage(*period, "minute", ["tenant"], access=OWNER)
    await reports.usage_page(*period, "minute", ["tenant"], limit=3, access=OWNER)
    await reports.totals(*period, ["tenant", "model"], rows_max=3, access=OWNER)
    assert read_rows == [4, 4, 3]


async def test_totals_equal_the_plain_sums_of_the_period(database: Database, events: list[UsageEvent]) -> None:
    reports, start, end = UsageReports(database, calendar=BillingCalendar()), START - timedelta(days=1, seconds=7), START
    inside = [event for event in events if start <= event.admitted_at < end]
    rows = await reports.totals(start, end, ["tenant"], access=OWNER)
    expected: dict[tuple[object, ...], int] = defaultdict(int)
    for event in inside:
        if event.status in ("posted", "recovered"):
            expected[event.tenant_id, event.currency] += event.cost_picos
    assert {(row.tenant_id, row.currency): row.cost_picos for row in rows} == expected
    assert {(row.start, row.end) for row in rows} == {(start, end)}
    assert await reports.totals(start, end, ["tenant"], rows_max=2, access=OWNER) == rows[:2]


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "America/St_Johns"])
async def test_a_report_counts_each_event_once_after_a_change_of_the_time_zone(
    database: Database, events: list[UsageEvent], zone: str
) -> None:
    calendar, start = BillingCalendar(zone), START - timedelta(days=1, hours=5)
    assert await rollups.align_days(database, calendar)
    reports = UsageReports(database, calendar=calendar)
    for end in (START + timedelta(hours=hours) for hours in range(-12, 40, 3)):
        inside = [event.cost_picos for event in events if start <= event.admitted_at < end and event.status in BILLED]
        rows = await reports.usage(start, end, "day", access=OWNER)
        assert sum(row.cost_picos for row in rows) == sum(inside)
    async with database.reading() as connection:
        assert await rollups.mismatched_levels(connection, database.kind, calendar) == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"bucket": "week"}, "bucket"),
        ({"group_by": ["colour"]}, "group_by"),
        ({"end": START}, "end"),
        ({"start": START.replace(tzinfo=None)}, "start"),
        ({"end": START.replace(tzinfo=None) + timedelta(days=1)}, "end"),
    ],
)
async def test_an_invalid_query_names_its_field(database: Database, changes: dict[str, object], param: str) -> None:
    question: dict[str, object] = {"start": START, "end": START + timedelta(days=1), "bucket": "day", "group_by": []}
    with pytest.raises(InvalidValue) as refused:
        await UsageReports(database, calendar=BillingCalendar()).usage(**(question | changes), access=OWNER)  # type: ignore[arg-type]
    assert refused.value.param == param
