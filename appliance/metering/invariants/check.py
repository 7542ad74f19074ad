"""Checks the ledger's invariants, row by row, on one snapshot of the live database.

tables      the database is at the newest revision, and (SQLite) its pages and foreign keys are intact
once        one usage event per request
pending     no event is pending for a process that has ended
settled     a settled event has its end time and finish reason, and is an estimate if recovered; a pending event has neither and
            costs nothing
counts      0 <= cached <= prompt, 0 <= completion, and the same counts on the request's row; voided events have none
requests    a request's row agrees with its event on tenant, key, model, finish reason and batch work; every row has an event
price       an event has the latest price of its model and currency that was in force, and one of that price's discounts: with
            the batch share for batch work
day         the billing day is within a day of the admission's UTC date: the time zone in force then is not stored
cost        equals the counts times the price that was in force, to the pico-unit; voided events cost nothing
sums        the totals by tenant, key and model that the database computes are the exact sum of the events
corrections an adjustment refers to the settled event that it corrects, and their sum is never below zero
postings    settled events are numbered 1, 2, 3 … without a gap, and the counter is at the last number
rollups     the sums by minute, hour and day equal those of the events
invoices    the lines of every closed invoice are the exact sum of the events that it covers; numbers have no gap
audit       the hash chain of the audit log is intact
kept        the triggers that protect the ledger exist and are enabled
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
from appliance.base.settings import UnusableData
from appliance.base.texts import counted
from appliance.metering import sealed_secrets
from appliance.metering.calendar import BillingCalendar
from appliance.metering.invariants import references, whole_ledger
from appliance.metering.invariants.finding import LISTED_MAX, Finding, list_ids
from appliance.metering.ledger import journal_records
from appliance.metering.ledger.records import TOKEN_COLUMNS
from appliance.metering.ledger.rollups import join_sum, split_sum
from appliance.metering.ledger.rows import price_query, rate_of
from appliance.tenancy.audit import AuditLog
from appliance.tenancy.secrets import read_pepper

BATCH_ROWS = 2000

_EVENTS = tables.usage_events
_REQUESTS = tables.requests


@dataclass(slots=True)
class _Tally:
    """Results of the pass over all events: cost sums by owner, and the violations of each invariant by request id."""

    pending: int = 0
    sums: dict[str, Counter[str]] = field(
        default_factory=lambda: {"tenant_id": Counter(), "key_id": Counter(), "model": Counter()}
    )
    violations: dict[str, list[str]] = field(
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
    """Return one finding per invariant. `running`: whether an appliance is using this database now.

    Tables of another version are the only finding: the statements of the other checks are for the newest ones.
    Secrets are checked only if `data_dir` is given. `on_progress` receives the fraction of events read, the longest part.
    Raises UnusableData if there are no tables, and the database's own error.
    """
    current = migrations.current_revision(url)
    problem = migrations.schema_problem(current)
    if problem is not None:
        if current is None:
            raise UnusableData(problem)
        return [Finding("tables", "broken", problem)]
    async with db.Database.open(url) as database:
        async with database.reading() as connection:
            findings = [await _check_tables(connection, database.kind), await _check_unique(connection)]
            epoch = await _running_epoch(connection) if running else None
            tally = _Tally()
            history = await references.PriceHistory.read(connection)
            num_events = (await connection.execute(select(func.count()).select_from(_EVENTS))).scalar_one()
            num_read = 0
            async for rows in _event_batches(connection):
                for row in rows:
                    _check_event(row, tally, epoch=epoch, running=running)
                    if row.kind == "usage":  # an adjustment has the price of the event that it corrects
                        history.check(row)
                num_read += len(rows)
                on_progress(num_read / num_events)
            tally.violations["requests"] += await references.requests_without_event(connection)
            tally.violations["price"] += history.violations()
            only_in_journal = 0 if running else await journal_records.count_unwritten_events(connection, url)
            findings += _findings_from_tally(tally, running=running, only_in_journal=only_in_journal)
            findings.append(await _check_sums(connection, tally))
            findings += await whole_ledger.check(connection, database.kind, BillingCalendar(time_zone))
            findings.append(await references.check_triggers(connection, database.kind))
            if data_dir is not None:
                findings.append(await _check_secrets(connection, data_dir))
        chain = await AuditLog(database, SystemClock()).verify()
        detail = (
            f"{counted(chain.entries, 'entry', plural='entries')}, each chained to the previous one"
            if chain.fault is None
            else chain.fault.text
        )
        return [*findings, Finding("audit", "holds" if chain.fault is None else "broken", detail)]


async def _check_tables(connection: AsyncConnection, kind: str) -> Finding:
    if kind == "sqlite":
        integrity = (await connection.execute(text("PRAGMA integrity_check(1)"))).scalar_one()
        dangling = (await connection.execute(text("PRAGMA foreign_key_check"))).all()
        if integrity != "ok" or dangling:
            return Finding("tables", "broken", f"integrity check says {integrity!r}; {len(dangling)} dangling foreign keys")
    return Finding("tables", "holds", f"revision {migrations.head_revision()}")


async def _check_secrets(connection: AsyncConnection, data_dir: Path) -> Finding:
    path = data_dir / PEPPER_FILE
    found = await sealed_secrets.find_unreadable(connection, read_pepper(data_dir) if path.exists() else None)
    if not found.unreadable:
        return Finding("secrets", "holds", f"{found.stored} sealed, each opens with secret.key")
    parts = [list_ids(ids, what) for ids, what in ((found.members, "second factors"), (found.webhooks, "webhooks")) if ids]
    why = f"{path} is not the file they were sealed with" if path.exists() else f"{path} does not exist"
    return Finding("secrets", "broken", f"cannot be opened: {'; '.join(parts)}; {why}: {sealed_secrets.ADVICE}")


async def _check_unique(connection: AsyncConnection) -> Finding:
    """Check that no request has two usage events, without relying on the unique index that should prevent it."""
    usage = _EVENTS.c.kind == "usage"
    twice = select(_EVENTS.c.request_id).where(usage).group_by(_EVENTS.c.request_id).having(func.count() > 1)
    ids = [row.request_id for row in (await connection.execute(twice.limit(LISTED_MAX))).all()]
    if ids:
        return Finding("once", "broken", f"requests with more than one event: {', '.join(ids)}")
    count = (await connection.execute(select(func.count()).select_from(_EVENTS))).scalar_one()
    return Finding("once", "holds", f"{counted(count, 'event')}, one per request")


async def _running_epoch(connection: AsyncConnection) -> str | None:
    latest = select(tables.epochs.c.id).order_by(tables.epochs.c.started_at.desc(), tables.epochs.c.id.desc()).limit(1)
    return (await connection.execute(latest)).scalar_one_or_none()


async def _event_batches(connection: AsyncConnection) -> AsyncIterator[Sequence[Any]]:
    """Yield all events, joined with their price and their request's row, in order of id, in non-empty batches."""
    columns = [
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
    joined = price_query().outerjoin(_REQUESTS, _REQUESTS.c.id == _EVENTS.c.request_id).add_columns(*columns)
    after = 0
    while True:
        page = joined.where(_EVENTS.c.id > after).order_by(_EVENTS.c.id).limit(BATCH_ROWS)
        rows = (await connection.execute(page)).all()
        if not rows:
            return
        yield rows
        after = rows[-1].id


def _check_event(row: Any, tally: _Tally, *, epoch: str | None, running: bool) -> None:
    """Add one event to the tally. Its price is checked by `PriceHistory`."""
    pending = row.status == "pending"
    counts_are_valid = _counts_are_valid(row, pending=pending)
    holds = {
        "pending": not (pending and running) or row.epoch_id == epoch,
        "settled": _settlement_is_valid(row, pending=pending),
        "counts": counts_are_valid,
        "cost": pending or not counts_are_valid or row.cost_picos == _expected_cost(row),
        "requests": references.agrees_with_request(row),
        "day": row.kind != "usage" or references.is_on_its_day(row),
    }
    for name, held in holds.items():
        if not held:
            tally.violations[name].append(row.request_id)
    tally.pending += pending
    for name, counter in tally.sums.items():
        counter[getattr(row, name)] += row.cost_picos


def _settlement_is_valid(row: Any, *, pending: bool) -> bool:
    if pending:
        return row.settled_at is None and row.finish_reason is None and row.cost_picos == 0
    if row.kind == "usage" and row.status == "recovered" and not row.estimated:
        return False
    return row.settled_at is not None and row.finish_reason is not None


def _counts_are_valid(row: Any, *, pending: bool) -> bool:
    if row.kind != "usage":
        return True  # signed; the sum with the corrected event is checked in `whole_ledger`
    if row.status == "voided" and (row.prompt_tokens or row.completion_tokens or row.rejected_tokens):
        return False
    if not 0 <= row.cached_tokens <= row.prompt_tokens or min(row.completion_tokens, row.rejected_tokens) < 0:
        return False
    return pending or row.request_row is None or references.counts_agree_with_request(row)


def _expected_cost(row: Any) -> int:
    if row.kind != "usage" and not (row.prompt_tokens or row.cached_tokens or row.completion_tokens or row.rejected_tokens):
        return int(row.cost_picos)  # a refund of money only
    rate = None if row.status == "voided" else rate_of(row._mapping)
    return 0 if rate is None else rate.cost_picos(**{name: getattr(row, name) for name in TOKEN_COLUMNS})


def _findings_from_tally(tally: _Tally, *, running: bool, only_in_journal: int) -> list[Finding]:
    texts = {
        "pending": f"{tally.pending} pending, all of the running process",
        "settled": "every settled event has its end time and reason",
        "counts": "all counts are valid and agree with the requests",
        "cost": "every cost equals counts times price",
        "requests": "every request's row agrees with its event",
        "price": "every event has the price that was in force",
        "day": "every event is billed on the day of its admission",
    }
    findings = [
        Finding(name, "broken", list_ids(ids, "events")) if ids else Finding(name, "holds", texts[name])
        for name, ids in tally.violations.items()
    ]
    if not running and (tally.pending or only_in_journal):
        more = f", {only_in_journal} more in its journal" if only_in_journal else ""
        note = Finding("pending", "note", f"{tally.pending} of a process that has ended{more}: settled by the next start")
        findings = [note if finding.name == "pending" else finding for finding in findings]
    return findings


async def _check_sums(connection: AsyncConnection, tally: _Tally) -> Finding:
    for name, counter in tally.sums.items():
        column = _EVENTS.c[name]
        totals = await connection.execute(select(column, *split_sum(_EVENTS.c.cost_picos)).group_by(column))
        if {key: join_sum(high, low) for key, high, low in totals.all()} != dict(counter):
            return Finding("sums", "broken", f"the totals by {name} are not the sum of their events")
    total = sum(tally.sums["tenant_id"].values())
    return Finding("sums", "holds", f"{total} pico-units in all, the same by tenant, key and model")
