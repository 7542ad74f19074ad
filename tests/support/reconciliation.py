"""Random months of ledger use, compared with a plain model: expected usage and costs in dictionaries.

A history runs from the end of September into December in Berlin: a day of 25 hours, a leap second as a step back of the clock,
steps back of hours across midnight, prices that change within months, tenants in two currencies, kills, corrections, and
invoices closed while requests of their month still run. The model uses no SQL, and only ids of the ledger.

The ledger runs as in the appliance: on SQLite with a journal, in which kills leave lines without rows, else without one.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from itertools import combinations
from typing import Any
from unittest.mock import patch
from zoneinfo import ZoneInfo

from sqlalchemy import select

from appliance.base.db import Database
from appliance.base.errors import InvalidValue
from appliance.base.journal import Journal
from appliance.base.tables import usage_events, usage_rollups
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invoicing.lines import ADJUSTMENT
from appliance.metering.invoicing.rows import Invoice
from appliance.metering.ledger import rollups, writer
from appliance.metering.ledger.corrections import Correction
from appliance.metering.ledger.epochs import begin_epoch
from appliance.metering.ledger.journal_records import open_journal, replay
from appliance.metering.ledger.operation_queue import COMBINE_FROM
from appliance.metering.ledger.records import PendingEvent, Settlement, Usage
from appliance.metering.ledger.recovery import recover
from appliance.metering.prices import Price
from appliance.metering.usage import GROUPS, UsageReports
from appliance.tenancy.pages import PAGE_ROWS_MAX
from tests.support import factories
from tests.support.cast import OWNER, Person, make_person
from tests.support.clock import FakeClock
from tests.support.ledgers import (
    FailingDatabase,
    euro_invoices,
    euro_prices,
    kill_ledger,
    utc_corrections,
    utc_ledger,
    without_alerts,
)

ZONE = "Europe/Berlin"
BEGIN = datetime(2026, 9, 29, 10, 0, tzinfo=UTC)
END = datetime(2026, 12, 2, 10, 0, tzinfo=UTC)
LEAP_SECOND = datetime(2026, 10, 31, 23, 0, 0, 400_000, tzinfo=UTC)  # just after midnight of November in Berlin
MODELS = ("small", "large", "free")
COLUMNS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "rejected_tokens", "cost_picos")
_TIERS = ("interactive", "standard", "batch")
_BATCH = 96
PATIENCE_S = 3600.0
"""Long, because a slow or suspended machine is no fault of the ledger."""
_LAST_BATCH = 9
"""Requests admitted, and requests settled, just before a kill: too few to be written to the tables together."""


@dataclass(slots=True)
class ExpectedEvent:
    """The model's record of one request or correction."""

    request_id: str
    tenant_id: str
    key_id: str
    model: str
    currency: str
    admitted_at: datetime
    price: Price | None
    basis_points: int
    batch: bool
    planned: tuple[int, int, int, int]
    counts: tuple[int, int, int, int] = (0, 0, 0, 0)
    cost_picos: int = 0
    is_request: bool = True
    settled: bool = False
    billed: bool = False
    event_id: int | None = None

    def bill(self, counts: tuple[int, int, int, int]) -> None:
        """Set the counts, and the cost by the rules of the price book, written out."""
        self.counts, self.billed = counts, True
        if self.price is None:
            return
        prompt, cached, completion, rejected = counts
        units = (self.price.prompt, self.price.cached_prompt, self.price.completion, self.price.rejected_draft)
        paid = [(2 * unit * self.basis_points + 10_000) // 20_000 for unit in units]
        self.cost_picos = (prompt - cached) * paid[0] + cached * paid[1] + completion * paid[2] + rejected * paid[3]

    @property
    def row(self) -> tuple[int, ...]:
        """Values in the order of COLUMNS."""
        return (int(self.is_request), *self.counts, self.cost_picos)


@dataclass
class History:
    """One random history over the database at `url`."""

    database: FailingDatabase
    url: str
    clock: FakeClock
    rng: random.Random
    facts: list[ExpectedEvent] = field(default_factory=list)
    open: list[ExpectedEvent] = field(default_factory=list)
    people: list[tuple[Person, str]] = field(default_factory=list)
    prices: list[Price] = field(default_factory=list)
    closed: int = 0
    recovered: int = 0
    replayed: int = 0
    steps_back: int = 0

    def __post_init__(self) -> None:
        self.calendar = BillingCalendar(ZONE)
        self.book = euro_prices(self.database, self.clock)
        self.invoices = euro_invoices(self.database, self.clock, self.calendar)
        self.corrections = utc_corrections(self.database, self.clock, calendar=self.calendar)
        self.reports = UsageReports(self.database, calendar=self.calendar)

    async def run(self, num_requests: int) -> None:
        """Run `num_requests` requests, and all other events between them."""
        await self._set_up()
        batch = min(_BATCH, max(4, num_requests // 120))
        rounds = -(-num_requests // batch)
        step_s = (END - BEGIN).total_seconds() / rounds
        rounds_of = {name: set(self.rng.sample(range(rounds), k=min(rounds, k))) for name, k in _NUM_OF_ACTIONS.items()}
        left = num_requests
        for number in range(rounds):
            self._advance_clock(self.rng.uniform(0, 2) * step_s)
            for name, at in rounds_of.items():
                if number in at:
                    await getattr(self, f"_{name}")()
            await self._requests(min(batch, left))
            left -= batch
            await self.close_months(0.2)
        await self._settle(len(self.open))
        await self._kill()
        await self._stop()

    async def _set_up(self) -> None:
        for name, currency in (("bob", "EUR"), ("charlie", "EUR"), ("dora", "CHF")):
            self.people.append((await make_person(self.database, self.clock, name), currency))
        for currency in ("EUR", "CHF"):
            for model in MODELS[:2]:
                await self._add_price(model, currency, None)
        await self._start()

    async def _start(self) -> None:
        """Start as the appliance does: replay the journal into the tables, then recover pending requests."""
        self.journal = open_journal(self.url)
        if self.journal is not None:
            self.replayed += await replay(self.database, self.journal, self.clock, self.calendar, without_alerts)
        self.epoch_id = await begin_epoch(self.database, self.clock, "reconciliation")
        self.recovered += await recover(
            self.database, self.clock, self.epoch_id, calendar=self.calendar, on_settled=without_alerts
        )
        for fact in self.open:
            fact.settled = True
            fact.bill(fact.counts)
        self.open.clear()
        await self._start_ledger()

    async def _start_ledger(self) -> None:
        self.ledger = utc_ledger(
            self.database, self.clock, self.epoch_id, calendar=self.calendar, checkpoint_interval_s=0.0, settle_pause_s=0.0,
            journal=self.journal, open_timeout_s=PATIENCE_S,
        )  # fmt: skip
        await self.ledger.start()

    async def _stop(self) -> None:
        await self.ledger.stop(PATIENCE_S)
        if self.journal is not None:
            await self.journal.close()

    def _advance_clock(self, seconds: float) -> None:
        """Advance the clock; at the leap second, one second is shown twice."""
        before = self.clock.now()
        self.clock.advance(seconds)
        if before < LEAP_SECOND <= self.clock.now():
            self.clock.jump_wall((LEAP_SECOND - self.clock.now()).total_seconds())
            self.leap = True

    async def _step_back(self) -> None:
        self.clock.jump_wall(-self.rng.choice([1, 1, 61, 3700, 90_000]))
        self.steps_back += 1

    async def _price(self) -> None:
        model, currency = self.rng.choice(MODELS[:2]), self.rng.choice(("EUR", "CHF"))
        ahead = timedelta(seconds=self.rng.choice([0, 0, 3600, 86400 * 3]) + self.rng.random())
        try:
            await self._add_price(model, currency, self.clock.now() + ahead)
        except InvalidValue:  # the clock was stepped back before an existing price
            return

    async def _add_price(self, model: str, currency: str, effective_from: datetime | None) -> None:
        unit = self.rng.randrange
        self.prices.append(
            await self.book.add(
                model=model,
                currency=currency,
                prompt=unit(1, 5_000_000),
                cached_prompt=unit(0, 500_000),
                completion=unit(1, 20_000_000),
                rejected_draft=self.rng.choice([0, unit(1, 900_000)]),
                batch_percent=self.rng.choice([50, 33, 100]),
                tier_percents={"batch": unit(101), "interactive": 100},
                effective_from=effective_from,
            )
        )

    async def _requests(self, count: int) -> None:
        """Admit some requests at once and settle some, these or earlier ones."""
        await self._open(count)
        await self._settle(int(len(self.open) * self.rng.uniform(0.5, 1.0)))

    async def _open(self, count: int) -> None:
        entries = [self._admit() for _ in range(count)]
        await asyncio.gather(*(self.ledger.open(entry) for entry in entries))

    def _admit(self) -> PendingEvent:
        if self.rng.random() < 0.2:
            self._advance_clock(self.rng.random())
        person, currency = self.rng.choice(self.people)
        model, now = self.rng.choice(MODELS), self.clock.now()
        price, tier, is_batch = self._price_in_force(model, currency, now), self.rng.choice(_TIERS), self.rng.random() < 0.2
        points = 10_000 if price is None else price.rate(tier, batch=is_batch).basis_points
        planned = self._counts()
        terms = {"price": price, "price_basis_points": points, "currency": currency, "prompt_tokens": planned[0]}
        entry = factories.pending(person, admitted_at=now, model=model, batch=is_batch, **terms)
        fact = ExpectedEvent(
            entry.request_id, person.tenant.id, person.key.id, model, currency, now, price, points, is_batch, planned
        )
        self.facts.append(fact)
        self.open.append(fact)
        return entry

    def _price_in_force(self, model: str, currency: str, at: datetime) -> Price | None:
        """The model of the price book: the latest price that is in effect."""
        begun = [price for price in self.prices if (price.model, price.currency) == (model, currency)]
        return max((price for price in begun if price.effective_from <= at), key=lambda p: p.effective_from, default=None)

    async def _settle(self, count: int) -> None:
        """Settle some requests: all at once, written directly to rows, or in portions, each of which gets a journal line."""
        chosen = self._take_running(count)
        is_split = self.journal is not None and self.rng.random() < 0.5
        size = self.rng.randrange(1, COMBINE_FROM) if is_split else max(count, 1)
        for first in range(0, count, size):
            await self.ledger.catch_up()
            await asyncio.gather(*(self.ledger.settle(self._end(fact)) for fact in chosen[first : first + size]))
        await self._note_events(chosen)

    def _take_running(self, count: int) -> list[ExpectedEvent]:
        """Remove and return `count` running requests."""
        self.rng.shuffle(self.open)
        return [self.open.pop() for _ in range(count)]

    async def _note_events(self, chosen: list[ExpectedEvent]) -> None:
        """Store the event ids of these requests."""
        of_usage = select(usage_events.c.request_id, usage_events.c.id).where(usage_events.c.kind == "usage")
        of_chosen = usage_events.c.request_id.in_([fact.request_id for fact in chosen])
        async with self.database.reading() as connection:
            rows = (await connection.execute(of_usage.where(of_chosen))).all()
        event_ids = {row.request_id: row.id for row in rows}
        for fact in chosen:
            fact.event_id = event_ids[fact.request_id]

    def _end(self, fact: ExpectedEvent) -> Settlement:
        fact.settled = True
        if self.rng.random() < 0.05:
            return factories.voided(fact.request_id)
        fact.bill(fact.planned)
        prompt, cached, completion, rejected = fact.counts
        usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion, rejected_tokens=rejected)
        return Settlement(request_id=fact.request_id, status="posted", finish_reason="stop", usage=usage)

    def _counts(self) -> tuple[int, int, int, int]:
        prompt = self.rng.choice([0, 1, self.rng.randrange(20_000)])
        rejected = self.rng.choice([0, 0, self.rng.randrange(500)])
        return prompt, self.rng.randrange(prompt + 1), self.rng.randrange(5000), rejected

    async def _kill(self) -> None:
        """Kill the process: half of the running requests had a checkpoint, the others no token."""
        # With a journal, the last requests have lines there but no rows.
        for fact in self.rng.sample(self.open, len(self.open) // 2):
            fact.counts = fact.planned
            prompt, cached, completion, rejected = fact.counts
            usage = Usage(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion, rejected_tokens=rejected)
            self.ledger.checkpoint({fact.request_id: usage})
        await self.ledger.stop(PATIENCE_S)
        promised = [] if self.journal is None else await self._die_before_the_rows(self.journal)
        await self._start()
        await self._note_events(promised)

    async def _die_before_the_rows(self, journal: Journal) -> list[ExpectedEvent]:
        """Admit and settle some requests while no transaction can commit, then kill; return those that must be billed."""
        await self._start_ledger()
        self.database.gate = asyncio.Event()
        await self._open(_LAST_BATCH)
        promised = self._take_running(min(_LAST_BATCH, len(self.open)))
        await asyncio.gather(*(self.ledger.settle(self._end(fact)) for fact in promised))
        await kill_ledger(self.ledger)
        self.database.gate = None
        await journal.close()
        return promised

    async def _correct(self) -> None:
        """Correct the tokens of a billed request, only once: a second correction would need its remaining tokens."""
        candidates = [fact for fact in self.facts if fact.event_id is not None and fact.billed and fact.is_request]
        for fact in self.rng.sample(candidates, min(3, len(candidates))):
            prompt, cached, completion, rejected = fact.counts
            change = (-self.rng.randrange(prompt - cached + 1), 0, -self.rng.randrange(completion + 1), -rejected)
            if not any(change):
                continue
            assert fact.event_id is not None
            correction_sent = Correction(
                note="test", prompt_tokens=change[0], completion_tokens=change[2], rejected_tokens=change[3]
            )
            recorded = await self.corrections.add(fact.event_id, correction_sent)
            correction = ExpectedEvent(
                fact.request_id, fact.tenant_id, fact.key_id, fact.model, fact.currency, fact.admitted_at, fact.price,
                fact.basis_points, fact.batch, change, is_request=False, settled=True, event_id=recorded.id,
            )  # fmt: skip
            correction.bill(change)
            self.facts.append(correction)
            fact.event_id = None

    async def close_months(self, chance: float) -> None:
        """Close months that are over, for some tenants at once and for others much later."""
        for person, _currency in self.people:
            month = self._next_month.get(person.tenant.id, "2026-09")
            if self.clock.now() < self.calendar.next_month_start(month) or self.rng.random() > chance:
                continue
            draft = await self.invoices.draft(person.tenant.id, month, access=OWNER)
            await self.invoices.close(draft.head.id, access=OWNER)
            self.closed += 1
            self._next_month[person.tenant.id] = f"2026-{int(month[5:]) + 1:02d}"

    _next_month: dict[str, str] = field(default_factory=dict)
    leap: bool = False


_NUM_OF_ACTIONS = {"step_back": 12, "price": 25, "kill": 6, "correct": 12}


async def check(history: History) -> dict[str, int]:
    """Compare every view of the ledger with the model; return the common totals."""
    billed = [fact for fact in history.facts if fact.billed]
    assert all(fact.settled for fact in history.facts)
    await _check_events(history, billed)
    await _check_rollups(history, billed)
    await _check_reports(history, billed)
    await _check_invoices(history, billed)
    return dict(zip(COLUMNS, _total(billed), strict=True))


def _total(facts: Iterable[ExpectedEvent]) -> list[int]:
    return [sum(column) for column in zip(*(fact.row for fact in facts), strict=True)] or [0] * len(COLUMNS)


async def _check_events(history: History, billed: list[ExpectedEvent]) -> None:
    async with history.database.reading() as connection:
        rows = (await connection.execute(select(usage_events).order_by(usage_events.c.posting))).mappings().all()
    assert [row["posting"] for row in rows] == list(range(1, len(history.facts) + 1))
    found = sorted(_figures(row) for row in rows if row["status"] in ("posted", "recovered"))
    assert found == sorted((fact.request_id, fact.currency, *fact.row) for fact in billed)
    assert sum(row["status"] == "recovered" for row in rows) == history.recovered
    batch = {fact.request_id: fact.batch for fact in history.facts}
    assert all(row["batch"] == batch[row["request_id"]] for row in rows)
    days = {fact.request_id: fact.admitted_at.astimezone(ZoneInfo(ZONE)).date() for fact in history.facts}
    assert all(row["billing_day"] == days[row["request_id"]] for row in rows)


def _figures(row: Any) -> tuple[Any, ...]:
    counts = (row[name] for name in COLUMNS[1:])
    return (row["request_id"], row["currency"], int(row["kind"] == "usage"), *counts)


async def _check_rollups(history: History, billed: list[ExpectedEvent]) -> None:
    before = await _rollup_rows(history.database)
    for bucket in ("minute", "hour", "day"):
        sums: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(COLUMNS))
        for fact in billed:
            _add_row(sums[_start(fact, bucket), fact.tenant_id, fact.key_id, fact.model, fact.currency], fact)
        assert {key[1:]: row for key, row in before.items() if key[0] == bucket} == dict(sums)
    await rollups.rebuild(history.database, history.calendar)
    assert await _rollup_rows(history.database) == before


async def _rollup_rows(database: Database) -> dict[tuple[Any, ...], list[int]]:
    async with database.reading() as connection:
        rows = (await connection.execute(select(usage_rollups))).mappings().all()
    return {
        tuple(row[name] for name in rollups.KEYS): [
            *(row[name] for name in COLUMNS[:-1]),
            row["cost_high"] * rollups.SPLIT + row["cost_low"],
        ]
        for row in rows
    }


def _start(fact: ExpectedEvent, bucket: str) -> datetime:
    """The start of the bucket, computed without the calendar under test."""
    if bucket == "minute":
        return fact.admitted_at.replace(second=0, microsecond=0)
    if bucket == "hour":
        return fact.admitted_at.replace(minute=0, second=0, microsecond=0)
    return _midnight(fact.admitted_at.astimezone(ZoneInfo(ZONE)).date())


def _midnight(day: date) -> datetime:
    return datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(ZONE)).astimezone(UTC)


def _add_row(row: list[int], fact: ExpectedEvent) -> None:
    for index, count in enumerate(fact.row):
        row[index] += count


async def _check_reports(history: History, billed: list[ExpectedEvent]) -> None:
    """Check the usage API's reports: of the whole history, and of arbitrary periods."""
    everything = (BEGIN - timedelta(days=2), END + timedelta(days=2))
    for bucket in ("hour", "day"):
        for size in range(len(GROUPS) + 1):
            for groups in combinations(GROUPS, size):
                await _check_report(history, billed, *everything, bucket, groups)
    moments = [fact.admitted_at for fact in billed]
    for _ in range(25):
        start, end = sorted(history.rng.choice(moments) + timedelta(microseconds=history.rng.randrange(3)) for _ in "ab")
        if start < end:
            await _check_report(history, billed, start, end, history.rng.choice(["hour", "day"]), ("tenant", "model"))
    for _ in range(10):
        start = history.rng.choice(moments)
        await _check_report(history, billed, start, start + timedelta(hours=25, seconds=0.5), "minute", ("key",))


async def _check_report(
    history: History, billed: list[ExpectedEvent], start: datetime, end: datetime, bucket: str, groups: tuple[str, ...]
) -> None:
    rows = await history.reports.usage(start, end, bucket, groups, access=OWNER)
    found = {
        (row.start, row.tenant_id, row.key_id, row.model, row.currency): [getattr(row, name) for name in COLUMNS]
        for row in rows
    }
    assert len(found) == len(rows)
    sums: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(COLUMNS))
    for fact in billed:
        if start <= fact.admitted_at < end:
            owner = {"tenant": fact.tenant_id, "key": fact.key_id, "model": fact.model}
            _add_row(
                sums[_start(fact, bucket), *(owner[name] if name in groups else None for name in GROUPS), fact.currency], fact
            )
    assert found == dict(sums)


async def _check_invoices(history: History, billed: list[ExpectedEvent]) -> None:
    """Check that every tenant's invoices, the last a draft, add up to its events before rounding, in total and per month."""
    history.clock.advance(max((END - history.clock.now()).total_seconds(), 0))
    for _ in range(3):
        await history.close_months(1.0)
    for person, _currency in history.people:
        tenant_id = person.tenant.id
        await history.invoices.draft(tenant_id, "2026-12", access=OWNER)
        invoices = (await history.invoices.list_for_tenant(tenant_id, access=OWNER)).data
        lines = [line for invoice in invoices for line in invoice.lines]
        facts = [fact for fact in billed if fact.tenant_id == tenant_id]
        assert sum(line.exact_picos for line in lines) == sum(fact.cost_picos for fact in facts)
        months: dict[tuple[str, str], int] = defaultdict(int)
        for fact in facts:
            months[f"{fact.admitted_at.astimezone(ZoneInfo(ZONE)):%Y-%m}", fact.model] += fact.cost_picos
        invoiced: dict[tuple[str, str], int] = defaultdict(int)
        for line in lines:
            assert line.model is not None
            invoiced[line.month, line.model] += line.exact_picos
        assert {key: cost for key, cost in invoiced.items() if cost} == {key: cost for key, cost in months.items() if cost}
        for invoice in invoices:
            await _check_batch_lines(history, invoice)


async def _check_batch_lines(history: History, invoice: Invoice) -> None:
    """Check that lines of batch work add up to the invoice's batch events and other lines to the rest; adjustments apart."""
    invoiced: dict[tuple[bool, bool], int] = defaultdict(int)
    for line in invoice.lines:
        invoiced[line.kind == ADJUSTMENT, line.batch] += line.exact_picos
    events: dict[tuple[bool, bool], int] = defaultdict(int)
    cursor, has_more = None, True
    while has_more:
        page = await history.invoices.events(invoice.head.id, PAGE_ROWS_MAX, cursor, access=OWNER)
        for event in page.data:
            is_late = event.kind != "usage" or f"{event.billing_day:%Y-%m}" != invoice.head.month
            events[is_late, event.batch and not is_late] += event.cost_picos
        cursor, has_more = page.next_cursor, page.has_more
    assert {key: cost for key, cost in invoiced.items() if cost} == {key: cost for key, cost in events.items() if cost}


async def reconcile(database: Database, url: str, num_requests: int, seed: int) -> tuple[History, dict[str, int]]:
    """Run a random history of `num_requests` in `database` (at `url`) and check it."""
    history = History(FailingDatabase.around(database), url, FakeClock(BEGIN), random.Random(seed))
    with patch.object(writer, "JOURNAL_TIMEOUT_S", PATIENCE_S):  # else a slow disk makes a settlement wait for the closed gate
        await history.run(num_requests)
    return history, await check(history)
