"""What must be true of the ledger at every moment, checked row by row on one snapshot of the live database.

tables      the database is at the newest revision, and (SQLite) its pages and references are whole
once        one usage event per request
pending     no event is pending for a process that has ended
settled     an event that is not pending says when and why it ended; a pending one says neither and costs nothing; a recovered
            one is an estimate
counts      0 <= cached <= prompt, 0 <= completion, and the request's own row has the same counts; voided events have none
requests    a request's own row agrees with its event on tenant, key, model, end and whether it is batch work, and no row is
            without an event
price       an event names the latest price of its model and currency that was in force, and a discount of that price: for
            batch work its batch share
day         the billing day is within a day of the admission's UTC date: the time zone in force then is not stored
cost        recomputed from the counts and the price that was in force, to the last pico-unit; voided events cost nothing
sums        the totals by tenant, by key and by model that the database computes are the exact sum of the events
corrections an adjustment names the settled event that it corrects, and their sum is never below zero
postings    settled events are numbered 1, 2, 3 … without a gap, and the counter is at the last number
rollups     the sums by minute, hour and day are those of the events
invoices    the lines of every closed invoice are the exact sum of the events that it covers; numbers have no gap
audit       the chain of the audit log is whole
kept        the triggers that protect all this exist and are switched on
secrets     sealed secrets (second factors, signing secrets of webhooks) open with the `secret.key` of the data folder
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import func, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base import db, migrations, tables
from appliance.base.clock import SystemClock
from appliance.base.data_folder import PEPPER_FILE
from appliance.base.money import cost_picos, discounted
from appliance.base.settings import UnusableData
from appliance.metering import sealed_secrets
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants import books, origins
from appliance.metering.invariants.finding import NAMED_MAX, Finding, named
from appliance.metering.ledger import journal_records
from appliance.metering.ledger.rollups import join_sum, split_sum
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.secrets import read_pepper

BATCH_ROWS = 2000

_EVENTS = tables.usage_events
_PRICES = tables.prices
_REQUESTS = tables.requests


@dataclass(slots=True)
class _Tally:
    """What one pass over the events collects."""

    pending: int = 0
    sums: dict[str, Counter[str]] = field(
        default_factory=lambda: {"tenant_id": Counter(), "key_id": Counter(), "model": Counter()}
    )
    wrong: dict[str, list[str]] = field(
        default_factory=lambda: {name: [] for name in ("pending", "settled", "counts", "cost", "requests", "price", "day")}
    )


async def check_ledger(
    url: str,
    *,
    running: bool,
    time_zone: str,
    data_dir: Path | None = None,
    on_progress: Callable[[float], None] = lambda _fraction: None,
) -> list[Finding]:
    """Return one finding per promise. `running` says whether an appliance is using this database now.

    Without the matching data folder the secrets are not checked. `on_progress` takes the fraction of the events that have been
    read, which is the longest part. Raises UnusableData if there are no tables, and the database's own error.
    """
    if migrations.current_revision(url) is None:
        raise UnusableData("the database has no tables yet: start the appliance once, or run gatehouse db upgrade")
    async with db.Database.open(url) as database:
        async with database.reading() as connection:
            findings = [await _tables(connection, url, database.kind), await _once(connection)]
            epoch = await _running_epoch(connection) if running else None
            tally = _Tally()
            history = await origins.PriceHistory.read(connection)
            num_events = (await connection.execute(select(func.count()).select_from(_EVENTS))).scalar_one()
            num_read = 0
            async for rows in _event_batches(connection):
                for row in rows:
                    _judge(row, tally, epoch=epoch, running=running)
                    _judge_origin(row, tally, history)
                num_read += len(rows)
                on_progress(num_read / num_events)
            tally.wrong["requests"] += await origins.requests_without_event(connection)
            tally.wrong["price"] += history.wrong()
            only_in_journal = 0 if running else await journal_records.count_unwritten_entries(connection, url)
            findings += _from_tally(tally, running=running, only_in_journal=only_in_journal)
            findings.append(await _sums(connection, tally))
            findings += await books.check(connection, database.kind, BillingCalendar(time_zone))
            findings.append(await origins.kept_rows(connection, database.kind))
            if data_dir is not None:
                findings.append(await _secrets(connection, data_dir))
        verdict = await AuditLog(database, SystemClock()).verify()
        audit = f"{verdict.entries} entries, each chained to the one before" if verdict.fault is None else verdict.fault.text
        return [*findings, Finding("audit", "holds" if verdict.fault is None else "broken", audit)]


async def _tables(connection: AsyncConnection, url: str, kind: str) -> Finding:
    current, head = migrations.current_revision(url), migrations.head_revision()
    if current != head:
        return Finding("tables", "broken", f"at revision {current}, the newest is {head}: run gatehouse db upgrade")
    if kind == "sqlite":
        whole = (await connection.execute(text("PRAGMA integrity_check(1)"))).scalar_one()
        dangling = (await connection.execute(text("PRAGMA foreign_key_check"))).all()
        if whole != "ok" or dangling:
            return Finding("tables", "broken", f"integrity check says {whole!r}, {len(dangling)} references lead nowhere")
    return Finding("tables", "holds", f"revision {head}")


async def _secrets(connection: AsyncConnection, data_dir: Path) -> Finding:
    path = data_dir / PEPPER_FILE
    found = await sealed_secrets.count(connection, read_pepper(data_dir) if path.exists() else None)
    if not found.unreadable:
        return Finding("secrets", "holds", f"{found.stored} sealed, each opens with secret.key")
    parts = [named(ids, what) for ids, what in ((found.members, "second factors"), (found.webhooks, "webhooks")) if ids]
    why = f"{path} is not the file they were sealed with" if path.exists() else f"{path} is not there"
    return Finding("secrets", "broken", f"cannot be opened: {'; '.join(parts)}; {why}: {sealed_secrets.ADVICE}")


async def _once(connection: AsyncConnection) -> Finding:
    """Check that no request has two usage events. The unique index should prevent it; this reads the rows without it."""
    usage = _EVENTS.c.kind == "usage"
    twice = select(_EVENTS.c.request_id).where(usage).group_by(_EVENTS.c.request_id).having(func.count() > 1)
    ids = [row.request_id for row in (await connection.execute(twice.limit(NAMED_MAX))).all()]
    if ids:
        return Finding("once", "broken", f"requests with more than one event: {', '.join(ids)}")
    count = (await connection.execute(select(func.count()).select_from(_EVENTS))).scalar_one()
    return Finding("once", "holds", f"{count} events, one per request")


async def _running_epoch(connection: AsyncConnection) -> str | None:
    latest = select(tables.epochs.c.id).order_by(tables.epochs.c.started_at.desc(), tables.epochs.c.id.desc()).limit(1)
    return (await connection.execute(latest)).scalar_one_or_none()


async def _event_batches(connection: AsyncConnection) -> AsyncIterator[Sequence[Any]]:
    """Yield every event with its price and its request's own counts, in order, in batches that are not empty."""
    columns = [
        *_EVENTS.c,
        _PRICES.c.prompt.label("prompt_price"),
        _PRICES.c.cached_prompt.label("cached_price"),
        _PRICES.c.completion.label("completion_price"),
        _PRICES.c.rejected_draft.label("rejected_price"),
        _PRICES.c.model.label("price_model"),
        _PRICES.c.currency.label("price_currency"),
        _PRICES.c.effective_from.label("price_from"),
        _PRICES.c.tier_percents.label("price_tiers"),
        _PRICES.c.batch_percent.label("price_batch"),
        _REQUESTS.c.id.label("request_row"),
        _REQUESTS.c.tenant_id.label("request_tenant"),
        _REQUESTS.c.key_id.label("request_key"),
        _REQUESTS.c.model.label("request_model"),
        _REQUESTS.c.batch.label("request_batch"),
        _REQUESTS.c.finish_reason.label("request_finish"),
        _REQUESTS.c.prompt_tokens.label("request_prompt"),
        _REQUESTS.c.cached_tokens.label("request_cached"),
        _REQUESTS.c.completion_tokens.label("request_completion"),
    ]
    joined = _EVENTS.outerjoin(_PRICES, _PRICES.c.id == _EVENTS.c.price_id).outerjoin(
        _REQUESTS, _REQUESTS.c.id == _EVENTS.c.request_id
    )
    after = 0
    while True:
        page = select(*columns).select_from(joined).where(_EVENTS.c.id > after).order_by(_EVENTS.c.id).limit(BATCH_ROWS)
        rows = (await connection.execute(page)).all()
        if not rows:
            return
        yield rows
        after = rows[-1].id


def _judge(row: Any, tally: _Tally, *, epoch: str | None, running: bool) -> None:
    wrong = tally.wrong
    pending = row.status == "pending"
    tally.pending += pending
    if pending and running and row.epoch_id != epoch:
        wrong["pending"].append(row.request_id)
    if _badly_settled(row, pending=pending):
        wrong["settled"].append(row.request_id)
    if not _counts_agree(row, pending=pending):
        wrong["counts"].append(row.request_id)
    elif not pending and row.cost_picos != _expected_cost(row):
        wrong["cost"].append(row.request_id)
    for name, counter in tally.sums.items():
        counter[getattr(row, name)] += row.cost_picos


def _judge_origin(row: Any, tally: _Tally, history: origins.PriceHistory) -> None:
    if row.kind == "usage":  # an adjustment has the price of the event that it corrects
        history.judge(row)
    right = {
        "requests": origins.agrees_with_request(row),
        "day": row.kind != "usage" or origins.is_on_its_day(row),
    }
    for name, holds in right.items():
        if not holds:
            tally.wrong[name].append(row.request_id)


def _badly_settled(row: Any, *, pending: bool) -> bool:
    if pending:
        return row.settled_at is not None or row.finish_reason is not None or row.cost_picos != 0
    if row.kind == "usage" and row.status == "recovered" and not row.estimated:
        return True
    return row.settled_at is None or row.finish_reason is None


def _counts_agree(row: Any, *, pending: bool) -> bool:
    if row.kind != "usage":
        return True  # signed; its sum with the event that it corrects is checked in `books`
    if row.status == "voided" and (row.prompt_tokens or row.completion_tokens or row.rejected_tokens):
        return False
    if not 0 <= row.cached_tokens <= row.prompt_tokens or min(row.completion_tokens, row.rejected_tokens) < 0:
        return False
    return pending or row.request_row is None or origins.counts_agree_with_request(row)


def _expected_cost(row: Any) -> int:
    if row.kind != "usage" and not (row.prompt_tokens or row.cached_tokens or row.completion_tokens or row.rejected_tokens):
        return int(row.cost_picos)  # money given back without tokens
    if row.status == "voided" or row.price_id is None:
        return 0
    return cost_picos(
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        rejected_tokens=row.rejected_tokens,
        **{
            name: discounted(getattr(row, name), row.price_basis_points)
            for name in ("prompt_price", "cached_price", "completion_price", "rejected_price")
        },
    )


def _from_tally(tally: _Tally, *, running: bool, only_in_journal: int) -> list[Finding]:
    good = {
        "pending": f"{tally.pending} pending, all of the running process",
        "settled": "every settled event says when and why",
        "counts": "counts are in order and agree with the requests",
        "cost": "every cost is its counts times its price",
        "requests": "every request's own row is that of its event",
        "price": "every event has the price that was in force",
        "day": "every event is billed on the day of its admission",
    }
    findings = [
        Finding(name, "broken", named(ids, "events")) if ids else Finding(name, "holds", good[name])
        for name, ids in tally.wrong.items()
    ]
    if not running and (tally.pending or only_in_journal):
        more = f", {only_in_journal} more in its journal" if only_in_journal else ""
        note = Finding("pending", "note", f"{tally.pending} of a process that has ended{more}: the next start settles them")
        findings = [note if finding.name == "pending" else finding for finding in findings]
    return findings


async def _sums(connection: AsyncConnection, tally: _Tally) -> Finding:
    for name, counter in tally.sums.items():
        column = _EVENTS.c[name]
        answer = await connection.execute(select(column, *split_sum(_EVENTS.c.cost_picos)).group_by(column))
        if {key: join_sum(high, low) for key, high, low in answer.all()} != dict(counter):
            return Finding("sums", "broken", f"the totals by {name} are not the sum of their events")
    total = sum(tally.sums["tenant_id"].values())
    return Finding("sums", "holds", f"{total} pico-units in all, the same by tenant, key and model")
