"""The journal's records, a write-ahead log of pending events and settlements: their encoding, and their replay to the tables.

On SQLite a request waits only for its journal record, at admission and at its end, not for its rows in the database: those
update ten indexes and wait for any other writer. The journal is next to the database file and as durable; the rows follow
within a moment. A later version may read the journal: new fields of these types must have defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

import msgspec
import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.batches import batched
from appliance.base.clock import Clock
from appliance.base.db import Database, parse_url
from appliance.base.journal import Journal, remaining_records
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import rows
from appliance.metering.ledger.records import TOKEN_COLUMNS, PendingEvent, Settlement
from appliance.metering.ledger.round import OnSettled, Round, Settle, is_bad_row

EVENTS_PER_TRANSACTION = 200
SUFFIX = ".admitted"
SETTLEMENT = b"settled "  # prefix of a settlement's record; all others are pending events
INTEGER_MAX = 2**63 - 1

_log = structlog.get_logger()


class JournaledEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A pending event and the other values of its rows. `currency` is the appliance's, used if neither price nor tenant has
    one."""

    epoch_id: str
    currency: str
    billing_day: date
    event: PendingEvent = msgspec.field(name="entry")


def open_journal(database_url: str) -> Journal | None:
    """Open the journal of a SQLite database; None for PostgreSQL, which has none (ADR 27). Raises OSError."""
    path = _path(database_url)
    return None if path is None else Journal(path, use_aio=True)


def _path(database_url: str) -> Path | None:
    """Return the path of the journal: next to the real database file, links resolved, like SQLite's own companion files."""
    kind, target = parse_url(database_url)
    return Path(f"{os.path.realpath(str(target.database))}{SUFFIX}") if kind == "sqlite" else None


def encode(item: JournaledEvent | Settlement) -> bytes:
    """Encode a pending event or a settlement. Raises ValueError for values that the tables cannot store: text that is not
    Unicode, a count beyond 64 bits."""
    if isinstance(item, JournaledEvent):
        prefix, count = b"", max(item.event.prompt_tokens, item.event.reserved_tokens)
    else:
        prefix, count = SETTLEMENT, max(getattr(item.usage, name) for name in TOKEN_COLUMNS)
    if count > INTEGER_MAX:
        raise ValueError("a count of tokens does not fit 64 bits")
    return prefix + _ENCODER.encode(item)


def decode(record: bytes) -> JournaledEvent | Settlement:
    """Decode a record to its pending event or settlement. Raises ValueError."""
    if record.startswith(SETTLEMENT):
        return _SETTLEMENTS.decode(record.removeprefix(SETTLEMENT))
    return _EVENTS.decode(record)


_ENCODER = msgspec.json.Encoder()
_EVENTS = msgspec.json.Decoder(JournaledEvent)
_SETTLEMENTS = msgspec.json.Decoder(Settlement)


async def replay(db: Database, journal: Journal, clock: Clock, calendar: BillingCalendar, on_settled: OnSettled) -> int:
    """Write to the tables what a dead process left in `journal`, and return how many records were missing there.

    `on_settled` receives the events settled here, as it does from the ledger. Call this before `recover`, which settles what is
    still pending. Raises OSError, or the database's error if it cannot be written; then nothing is lost.
    """
    events, settlements = _read(journal.read_remaining())
    count = 0
    for event_batch in batched(events, EVENTS_PER_TRANSACTION):
        count += await _write_events(db, event_batch)
    for settlement_batch in batched(settlements, EVENTS_PER_TRANSACTION):
        count += await _write_settlements(db, clock, calendar, settlement_batch, on_settled)
    journal.clear()
    return count


async def count_unwritten_events(connection: AsyncConnection, database_url: str) -> int:
    """Count the pending events of a stopped appliance that are in its journal but not in the tables. Raises OSError."""
    events, _ = _read_journal_of(database_url)
    count = len(events)
    for request_ids in batched([journaled.event.request_id for journaled in events], EVENTS_PER_TRANSACTION):
        count -= len(await connection.run_sync(rows.existing, request_ids))
    return count


async def count_unwritten_requests(connection: AsyncConnection, database_url: str) -> int:
    """Count the requests whose admission or settlement is in the journal of a stopped appliance but not in the tables. Raises
    OSError."""
    events, settlements = _read_journal_of(database_url)
    admitted = {journaled.event.request_id for journaled in events}
    settled = {settlement.request_id for settlement in settlements}
    missing: set[str] = set()
    for request_ids, find_written in ((admitted, rows.existing), (settled, rows.finished)):
        for batch in batched(sorted(request_ids), EVENTS_PER_TRANSACTION):
            missing |= set(batch) - await connection.run_sync(find_written, batch)
    return len(missing)


def _read_journal_of(database_url: str) -> tuple[list[JournaledEvent], list[Settlement]]:
    """Return the contents of a stopped appliance's journal; nothing for PostgreSQL, which has none."""
    path = _path(database_url)
    return _read([] if path is None else remaining_records(path))


def _read(records: Iterable[bytes]) -> tuple[list[JournaledEvent], list[Settlement]]:
    """Return the pending events and settlements in `records`; unreadable records are logged."""
    events: list[JournaledEvent] = []
    settlements: list[Settlement] = []
    for record in records:
        try:
            item = decode(record)
        except ValueError as error:
            _log.error("unreadable journal record", error=str(error), record=record.decode(errors="replace"))
            continue
        if isinstance(item, JournaledEvent):
            events.append(item)
        else:
            settlements.append(item)
    return events, settlements


async def _write_events(db: Database, events: Sequence[JournaledEvent]) -> int:
    try:
        return await db.batch_write(_insert_missing, events)
    except (StatementError, ValueError, OverflowError) as error:
        if not is_bad_row(error):
            raise
        if len(events) > 1:
            return sum([await _write_events(db, [event]) for event in events])
        # Its tenant or its epoch is missing: the database is older than the journal.
        _log.error("the tables rejected a journaled entry", error=str(error), record=_ENCODER.encode(events[0]).decode())
        return 0


def _insert_missing(connection: Connection, events: Sequence[JournaledEvent]) -> int:
    existing = rows.existing(connection, [journaled.event.request_id for journaled in events])
    missing = [journaled for journaled in events if journaled.event.request_id not in existing]
    if missing:
        event_rows = [rows.event_row(new.event, new.epoch_id, new.currency, new.billing_day) for new in missing]
        rows.insert(connection, [journaled.event for journaled in missing], event_rows)
    return len(missing)


async def _write_settlements(
    db: Database, clock: Clock, calendar: BillingCalendar, settlements: Sequence[Settlement], on_settled: OnSettled
) -> int:
    """Settle the requests that are still pending, as the ledger would have; rejected and unknown ones are logged."""
    async with db.reading() as connection:
        request_ids = [settlement.request_id for settlement in settlements]
        finished = await connection.run_sync(rows.finished, request_ids)
    missing = [Settle(settlement=settlement) for settlement in settlements if settlement.request_id not in finished]
    replayed = Round(
        db=db, epoch_id="", currency="", calendar=calendar, now=clock.now(), operations=missing, checkpoints={}, opened={},
        on_settled=on_settled,
    )  # fmt: skip
    await replayed.write()
    replayed.report_results()
    return sum(operation.written for operation in missing)
