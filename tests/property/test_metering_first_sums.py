"""Sums read for many owners at once equal a plain scan of all events for each."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import insert

from appliance.base.db import Database
from appliance.base.tables import limit_levels, usage_events
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rollups
from appliance.metering.limits.decisions import LimitKind
from appliance.metering.limits.owners import ALL_TENANTS, Owner, owners_of
from appliance.metering.limits.sums import PeriodSums, SavedLevel
from appliance.metering.limits.windows import Moment
from tests.support.cast import Cast, Person, make_person
from tests.support.clock import FakeClock
from tests.support.empty_sums import EmptySums
from tests.support.ledgers import utc_admission, utc_sums

EVENTS = 150
MODELS = ("demo", "other")
KINDS: tuple[LimitKind, ...] = ("tokens", "requests")
CALENDAR = BillingCalendar("Europe/Zurich")
DAY, HOUR, MINUTE = 86400.0, 3600.0, 60.0
Row = dict[str, Any]
Levels = Mapping[Owner, Mapping[LimitKind, SavedLevel]]


def some_event(chance: random.Random, number: int, person: Person, epoch_id: str, at: Moment) -> Row:
    """Return an event of the last minutes, hours or weeks, settled or not; few are corrections."""
    age_s = chance.uniform(0, chance.choice([2 * MINUTE, 2 * HOUR, 40 * DAY]))
    admitted_at = at.now - timedelta(seconds=round(age_s, 6))
    status = chance.choice(["posted", "posted", "posted", "recovered", "voided", "pending"])
    return {
        "id": number,
        "request_id": f"req_{number}",
        "tenant_id": person.tenant.id,
        "key_id": person.key.id,
        "epoch_id": epoch_id,
        "model": chance.choice(MODELS),
        "endpoint": "/v1/completions",
        "kind": "adjustment" if number and chance.random() < 0.1 else "usage",
        "status": status,
        "reserved_tokens": chance.randrange(200),
        "prompt_tokens": chance.randrange(100),
        "cached_tokens": 0,
        "completion_tokens": chance.randrange(200),
        "estimated": False,
        "cost_picos": chance.choice([1, 10**9 - 1, 10**15 + 7]),
        "currency": chance.choice(["EUR", "CHF"]),
        "billing_day": CALENDAR.day_of(admitted_at),
        "posting": None if status == "pending" else number + 1,
        "admitted_at": admitted_at,
        "settled_at": None if status == "pending" else admitted_at + timedelta(seconds=chance.choice([0.001, 5, 4000])),
    }


def some_levels(chance: random.Random, owners: Sequence[Owner], at: Moment) -> dict[Owner, dict[LimitKind, SavedLevel]]:
    """Return levels as an earlier process has saved them: of some owners, and of some of these one alone."""
    return {
        owner: {
            kind: SavedLevel(
                capacity=chance.randrange(1000),
                units=chance.randrange(-(10**12), 10**12),
                saved_at=at.now - timedelta(seconds=chance.choice([1, 50, 3000, 2 * DAY])),
            )
            for kind in KINDS
            if chance.random() < 0.6
        }
        for owner in owners
    }


def plainly(owner: Owner, currency: str, events: Sequence[Row], levels: Levels, at: Moment) -> PeriodSums:
    """Return the sums of one owner, from all events."""
    settled = [
        event
        for event in events
        if event["status"] in ("posted", "recovered")
        and owner in owners_of(event["tenant_id"], event["key_id"], event["model"])
    ]
    usage = [event for event in settled if event["kind"] == "usage"]
    recent = [
        (event["admitted_at"], tokens_of(event)) for event in usage if event["admitted_at"] >= at.now - timedelta(minutes=1)
    ]
    known = levels[owner]
    found = {}
    for kind, level in known.items():
        since = []
        for event in usage:
            used, reserved = tokens_of(event), event["reserved_tokens"]
            if event["admitted_at"] >= level.saved_at:
                since.append((event["admitted_at"], min(used, reserved) if kind == "tokens" else 1))
            if event["settled_at"] >= level.saved_at and kind == "tokens" and used > reserved:
                since.append((event["settled_at"], used - reserved))
        found[kind] = dataclasses.replace(level, since=tuple(sorted(since)))
    costs: Counter[str] = Counter()
    for event in settled:
        costs[event["currency"]] += event["cost_picos"] if event["billing_day"] >= at.month else 0
    return PeriodSums(
        tokens_today=sum(tokens_of(event) for event in settled if event["billing_day"] == at.day),
        cost_month_picos=costs.pop(currency, 0),
        other_costs_picos=costs,
        recent=() if len(known) == len(KINDS) else tuple(sorted(recent)),
        levels=found,
    )


def tokens_of(event: Row) -> int:
    return int(event["prompt_tokens"] + event["completion_tokens"])


@pytest.mark.parametrize("seed", range(4))
async def test_sums_read_in_a_batch_equal_a_plain_scan(database: Database, clock: FakeClock, cast: Cast, seed: int) -> None:
    chance, at = random.Random(seed), utc_admission(clock, EmptySums(), calendar=CALENDAR)._moment()
    people = [cast.bob, cast.charlie, await make_person(database, clock, "dora")]
    events = [some_event(chance, number, chance.choice(people), cast.epoch_id, at) for number in range(EVENTS)]
    ids = [Owner("tenant", person.tenant.id) for person in people] + [Owner("key", person.key.id) for person in people]
    owners = [Owner(owner.scope, owner.id, model) for owner in ids for model in (None, *MODELS)]
    owners += [Owner("model", ALL_TENANTS, model) for model in MODELS]
    levels = some_levels(chance, owners, at)
    async with database.writing() as connection:
        await connection.execute(insert(usage_events), events)
        saved = [
            {"owner": owner.id, "model": owner.model or "", "kind": kind, "capacity": level.capacity,
             "level_units": str(level.units), "saved_at": level.saved_at}
            for owner, known in levels.items() for kind, level in known.items()
        ]  # fmt: skip
        await connection.execute(insert(limit_levels), saved)
    await rollups.rebuild(database, CALENDAR)

    asked = {owner: chance.choice(["EUR", "CHF"]) for owner in chance.sample(owners, 12)}
    found = await utc_sums(database, calendar=CALENDAR).read(asked, at)

    assert found == {owner: plainly(owner, currency, events, levels, at) for owner, currency in asked.items()}
