"""Concatenated pages of a report equal the report, for any query, on both databases, while events arrive."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import insert, select

from appliance.base.db import Database
from appliance.base.errors import InvalidValue
from appliance.base.tables import usage_appliance_rollups, usage_events
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.usage import BUCKETS, GROUPS, UsageFilter, UsageReports, UsageRow
from appliance.metering.usage_segments import bucket_start
from appliance.tenancy.keys import Keys
from appliance.tenancy.pages import encode_cursor
from tests.support.cast import OWNER, PEPPER, Cast, make_person
from tests.support.clock import FakeClock
from tests.support.ledgers import all_events

ZONE = "Europe/Berlin"
CLOCKS_GO_BACK = datetime(2026, 10, 25, 1, tzinfo=UTC)
CLOCKS_GO_FORWARD = datetime(2026, 3, 29, 1, tzinfo=UTC)
EVENTS, NUM_QUERIES = 300, 18
MODELS = ("demo", "other", "qwen/größer\u200b", "模" * 200)
RowKey = tuple[Any, ...]


@dataclass(kw_only=True)
class UsageHistory:
    """Random events of three tenants and their keys around a day on which clocks are changed."""

    database: Database
    cast: Cast
    chance: random.Random
    middle: datetime
    owners: list[tuple[str, str]]
    calendar: BillingCalendar = field(default_factory=lambda: BillingCalendar(ZONE))
    written: int = 0

    @property
    def reports(self) -> UsageReports:
        """The reports under test."""
        return UsageReports(self.database, calendar=self.calendar)

    def moment(self) -> datetime:
        """Return a moment near the change of clocks: most in a few hours and minutes, many at the edges of buckets."""
        span_us = self.chance.choice([48 * 3_600_000_000, 3_600_000_000, 120_000_000])
        moment = self.middle + timedelta(microseconds=self.chance.randrange(-span_us, span_us))
        unit = self.chance.choice([None, "minute", "hour", "day"])
        edge = moment if unit is None else bucket_start(moment, unit, self.calendar)
        return edge - timedelta(microseconds=self.chance.choice([0, 0, 1]))

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return new events."""
        return [self._row() for _ in range(count)]

    def _row(self) -> dict[str, Any]:
        self.written += 1
        chance, admitted_at, prompt = self.chance, self.moment(), self.chance.randrange(1000)
        tenant_id, key_id = chance.choice(self.owners)
        adjustment = self.written % 11 == 0
        return {
            "request_id": f"req_{self.written}",
            "tenant_id": tenant_id,
            "key_id": key_id,
            "epoch_id": self.cast.epoch_id,
            "model": chance.choice(MODELS),
            "endpoint": "/v1/completions",
            "kind": "adjustment" if adjustment else "usage",
            "status": chance.choice(["posted", "posted", "posted", "recovered", "voided", "pending"]),
            "reserved_tokens": 0,
            "prompt_tokens": prompt,
            "cached_tokens": chance.randrange(prompt + 1),
            "completion_tokens": chance.randrange(1000),
            "rejected_tokens": chance.randrange(10),
            "estimated": False,
            "cost_picos": chance.randrange(-(2**62), 2**63) if adjustment else chance.randrange(2**63),
            "currency": chance.choice(["EUR", "EUR", "USD"]),
            "billing_day": self.calendar.day_of(admitted_at),
            "admitted_at": admitted_at,
        }

    async def write(self, count: int) -> None:
        """Write events as the ledger does: with their sums, in one transaction."""
        known = len(await all_events(self.database))
        async with self.database.writing() as connection:
            await connection.execute(insert(usage_events), self.rows(count))
        new = (await all_events(self.database))[known:]
        async with self.database.writing() as connection:
            await connection.run_sync(rollups.add, self.calendar, new)

    def query(self) -> dict[str, Any]:
        """Return the arguments of a random report."""
        chance = self.chance
        start, end = sorted([self.moment(), self.moment()])
        keys = [key_id for _tenant_id, key_id in self.owners]
        tenants = sorted({tenant_id for tenant_id, _key_id in self.owners})
        return {
            "start": start if chance.random() < 0.5 else self.middle - timedelta(days=3),
            "end": end + timedelta(microseconds=1) if chance.random() < 0.5 else self.middle + timedelta(days=3),
            "bucket": chance.choice(BUCKETS),
            "group_by": chance.sample(GROUPS, chance.randrange(len(GROUPS) + 1)),
            "filters": UsageFilter(
                tenant_ids=chance.choice([None, None, *([tenant_id] for tenant_id in tenants)]),
                key_ids=None if chance.random() < 0.7 else chance.sample(keys, chance.randrange(1, 3)),
                models=None if chance.random() < 0.7 else chance.sample(MODELS, chance.randrange(1, 3)),
            ),
        }


@pytest.fixture(params=[CLOCKS_GO_BACK, CLOCKS_GO_FORWARD], ids=["25 hours", "23 hours"])
async def history(request: pytest.FixtureRequest, database: Database, clock: FakeClock, cast: Cast) -> UsageHistory:
    """Events on both sides of the change."""
    keys = Keys(database, clock, PEPPER)
    dora = await make_person(database, clock, "dora")
    owners = [(person.tenant.id, person.key.id) for person in (cast.bob, cast.charlie, dora)]
    for number in range(3):
        key, _secret = await keys.create(cast.bob.tenant.id, name=f"key {number}", access=OWNER)
        owners.append((cast.bob.tenant.id, key.id))
    made = UsageHistory(database=database, cast=cast, chance=random.Random(11), middle=request.param, owners=owners)
    await made.write(EVENTS)
    return made


def plain_report(events: Sequence[UsageEvent], calendar: BillingCalendar, query: dict[str, Any]) -> dict[RowKey, list[int]]:
    """The plain twin of the report: one loop over all events."""

    def matches(value: str, values: Collection[str] | None) -> bool:
        return values is None or value in values

    filters: UsageFilter = query["filters"]
    sums: dict[RowKey, list[int]] = {}
    for event in events:
        is_inside = query["start"] <= event.admitted_at < query["end"] and event.status in ("posted", "recovered")
        is_inside = is_inside and matches(event.tenant_id, filters.tenant_ids)
        if not (is_inside and matches(event.key_id, filters.key_ids) and matches(event.model, filters.models)):
            continue
        names = {"tenant": event.tenant_id, "key": event.key_id, "model": event.model}
        shown = [names[name] if name in query["group_by"] else None for name in GROUPS]
        counts = [int(event.kind == "usage"), event.prompt_tokens, event.cached_tokens, event.completion_tokens]
        counts += [event.rejected_tokens, event.cost_picos]
        key = (bucket_start(event.admitted_at, query["bucket"], calendar), *shown, event.currency)
        sums[key] = [one + other for one, other in zip(sums.get(key, [0] * 6), counts, strict=True)]
    return sums


def key_of(row: UsageRow) -> RowKey:
    return row.start, row.tenant_id, row.key_id, row.model, row.currency


def counts_of(row: UsageRow) -> list[int]:
    counts = [row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.rejected_tokens]
    return [*counts, row.cost_picos]


async def read_pages(history: UsageHistory, query: dict[str, Any], limit: int) -> list[UsageRow]:
    """Return the rows of all pages; every page but the last is full, and only the last may be empty."""
    rows: list[UsageRow] = []
    cursor = None
    while True:
        page = await history.reports.usage_page(**query, limit=limit, cursor=cursor, access=OWNER)
        rows += page.data
        assert len(page.data) == limit or not page.has_more
        assert page.has_more == (page.next_cursor is not None)
        if not page.has_more:
            return rows
        cursor = page.next_cursor


async def test_concatenated_pages_equal_the_whole_report(history: UsageHistory) -> None:
    events = await all_events(history.database)
    lengths = []
    for _ in range(NUM_QUERIES):
        query, limit = history.query(), history.chance.choice([1, 2, 3, 7, 50, 1000])
        whole = await history.reports.usage(**query, access=OWNER)
        assert {key_of(row): counts_of(row) for row in whole} == plain_report(events, history.calendar, query), query
        assert await read_pages(history, query, limit) == whole, (query, limit)
        assert await history.reports.usage(**query, rows_max=limit, access=OWNER) == whole[:limit], query
        lengths.append(len(whole))
    assert max(lengths) > 100
    assert 0 in lengths


async def test_settlements_between_two_pages_neither_repeat_nor_lose_rows(history: UsageHistory) -> None:
    for _ in range(NUM_QUERIES // 6):
        query, limit = history.query(), history.chance.choice([3, 7, 20])
        before = {key_of(row) for row in await history.reports.usage(**query, access=OWNER)}
        shown: list[RowKey] = []
        cursor = None
        while True:
            whole = await history.reports.usage(**query, access=OWNER)
            page = await history.reports.usage_page(**query, limit=limit, cursor=cursor, access=OWNER)
            # Each row is what the report says at the moment of its page, and they go on without a gap.
            begin = whole.index(page.data[0]) if page.data else len(whole)
            assert page.data == whole[begin : begin + limit]
            assert not {key_of(row) for row in whole[:begin]} & before - set(shown), query
            shown += [key_of(row) for row in page.data]
            cursor = page.next_cursor
            if cursor is None:
                break
            await history.write(5)
        assert len(set(shown)) == len(shown), query
        assert before <= set(shown), query


async def test_a_cursor_continues_in_the_period_of_its_report(history: UsageHistory) -> None:
    day = timedelta(days=1)
    report: dict[str, Any] = {"bucket": "minute", "group_by": ["key"], "limit": 10}
    whole = await history.reports.usage(history.middle - day, history.middle + day, "minute", ["key"], access=OWNER)
    first = await history.reports.usage_page(history.middle - day, history.middle + day, **report, access=OWNER)
    second = await history.reports.usage_page(
        history.middle, history.middle + 2 * day, **report, cursor=first.next_cursor, access=OWNER
    )
    assert first.data + second.data == whole[:20]


async def test_a_cursor_of_another_report_is_refused(history: UsageHistory) -> None:
    period = (history.middle - timedelta(days=1), history.middle + timedelta(days=1))
    page = await history.reports.usage_page(*period, "hour", ["tenant"], limit=1, access=OWNER)
    for bucket, groups in (("minute", ["tenant"]), ("hour", ["model"]), ("hour", ["tenant", "model"]), ("hour", [])):
        with pytest.raises(InvalidValue) as refused:
            await history.reports.usage_page(*period, bucket, groups, limit=1, cursor=page.next_cursor, access=OWNER)
        assert refused.value.param == "cursor"


async def test_a_cursor_of_a_report_with_other_filters_is_refused(history: UsageHistory) -> None:
    period = (history.middle - timedelta(days=1), history.middle + timedelta(days=1))
    tenant_id, key_id = history.owners[0]
    all_filters = [
        UsageFilter(),
        UsageFilter(tenant_ids=[tenant_id]),
        UsageFilter(key_ids=[key_id]),
        UsageFilter(models=MODELS[:2]),
    ]
    for filters in all_filters:
        page = await history.reports.usage_page(*period, "hour", ["key"], filters, limit=1, access=OWNER)
        for other in all_filters:
            again = history.reports.usage_page(*period, "hour", ["key"], other, limit=1, cursor=page.next_cursor, access=OWNER)
            if other == filters:
                assert (await again).data
                continue
            with pytest.raises(InvalidValue) as refused:
                await again
            assert refused.value.param == "cursor"


async def test_a_cursor_with_an_invalid_period_is_refused(history: UsageHistory) -> None:
    period = (history.middle - timedelta(days=1), history.middle + timedelta(days=1))
    cursor = (await history.reports.usage_page(*period, "hour", limit=1, access=OWNER)).next_cursor
    assert cursor is not None
    padded = cursor + "=" * (-len(cursor) % 4)
    name, start, end, *key = json.loads(base64.urlsafe_b64decode(padded))
    for reversed_or_empty in ([end, start], [start, start]):
        forged = encode_cursor(name, [*reversed_or_empty, *key])
        with pytest.raises(InvalidValue) as refused:
            await history.reports.usage_page(*period, "hour", limit=1, cursor=forged, access=OWNER)
        assert refused.value.param == "cursor"


async def test_the_sums_of_the_appliance_match_its_owners_and_can_be_rebuilt(history: UsageHistory) -> None:
    async def appliance_sums() -> set[tuple[Any, ...]]:
        async with history.database.reading() as connection:
            rows = (await connection.execute(select(usage_appliance_rollups))).all()
        return {tuple(row) for row in rows}

    for _ in range(10):
        await history.write(7)
    written = await appliance_sums()
    assert len(written) > 50
    await rollups.rebuild(history.database, history.calendar)
    assert await appliance_sums() == written
    async with history.database.reading() as connection:
        assert await rollups.mismatched_levels(connection, history.database.kind, history.calendar) == []
