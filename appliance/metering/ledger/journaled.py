"""The contents of the journal: pending entries and settlements, how they are encoded there and written to the tables.

On SQLite a request, when it is admitted and when it ends, waits for a line in the journal, not for its rows in the database:
those update ten indexes and wait for any other writer. The file is next to the database and as durable; the rows follow within
a moment. A later version may read the journal: new fields of these types must have defaults.
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
from appliance.metering.ledger.records import TOKEN_COLUMNS, PendingEntry, Settlement
from appliance.metering.ledger.round import OnSettled, Round, Settle, is_bad_row

ENTRIES_PER_TRANSACTION = 200
SUFFIX = ".admitted"
SETTLEMENT = b"settled "  # prefix of a settlement's record; all others are entries
INTEGER_MAX = 2**63 - 1

_log = structlog.get_logger()


class Journaled(msgspec.Struct, frozen=True, kw_only=True):
    """A pending entry and the other values of its rows. `currency` is the box's, used if neither price nor tenant has one."""

    epoch_id: str
    currency: str
    billing_day: date
    entry: PendingEntry


def journal_beside(database_url: str) -> Journal | None:
    """Open the journal of a SQLite database; None for PostgreSQL, whose data is on a disk of its own. Raises OSError."""
    path = _path(database_url)
    return None if path is None else Journal(path, use_aio=True)


def _path(database_url: str) -> Path | None:
    """Return the path of the journal: next to the real database file, links resolved, like SQLite's own companion files."""
    kind, target = parse_url(database_url)
    return Path(f"{os.path.realpath(str(target.database))}{SUFFIX}") if kind == "sqlite" else None


def encode(item: Journaled | Settlement) -> bytes:
    """Return the record of an entry or a settlement. Raises ValueError for values that no table takes: text that is not
    Unicode, a huge count."""
    if isinstance(item, Journaled):
        prefix, count = b"", max(item.entry.prompt_tokens, item.entry.reserved_tokens)
    else:
        prefix, count = SETTLEMENT, max(getattr(item.usage, name) for name in TOKEN_COLUMNS)
    if count > INTEGER_MAX:
        raise ValueError("a count of tokens does not fit 64 bits")
    return prefix + _ENCODER.encode(item)


def decode(record: bytes) -> Journaled | Settlement:
    """Return the entry or the settlement of a record. Raises ValueError."""
    if record.startswith(SETTLEMENT):
        return _SETTLEMENTS.decode(record.removeprefix(SETTLEMENT))
    return _ENTRIES.decode(record)


_ENCODER = msgspec.json.Encoder()
_ENTRIES = msgspec.json.Decoder(Journaled)
_SETTLEMENTS = msgspec.json.Decoder(Settlement)


async def replay(
    db: Database, journal: Journal, clock: Clock, calendar: BillingCalendar, on_settled: OnSettled | None = None
) -> int:
    """Write what a dead process left in `journal` to the tables, and return how many records were missing there.

    `on_settled` gets the events that this settles, as it gets those of the ledger. Call it before `recover`, which settles what
    is still pending. Raises OSError, or the database's error when it cannot be written; nothing is lost then.
    """
    entries, settlements = _read(journal.read_remaining())
    count = 0
    for admitted in batched(entries, ENTRIES_PER_TRANSACTION):
        count += await _put_in_tables(db, admitted)
    for ended in batched(settlements, ENTRIES_PER_TRANSACTION):
        count += await _settle(db, clock, calendar, ended, on_settled)
    journal.clear()
    return count


async def only_in_journal(connection: AsyncConnection, database_url: str) -> int:
    """Return how many entries of a stopped appliance are only in its journal, not in the tables. Raises OSError."""
    entries, _ = _left_beside(database_url)
    count = len(entries)
    for some in batched([admitted.entry.request_id for admitted in entries], ENTRIES_PER_TRANSACTION):
        count -= len(await connection.run_sync(rows.known, some))
    return count


async def ahead_of_tables(connection: AsyncConnection, database_url: str) -> int:
    """Return for how many requests the journal of a stopped appliance has an admission or a settlement that the tables lack.
    Raises OSError."""
    entries, settlements = _left_beside(database_url)
    admitted = {found.entry.request_id for found in entries}
    settled = {found.request_id for found in settlements}
    missing: set[str] = set()
    for request_ids, in_tables in ((admitted, rows.known), (settled, rows.ended)):
        for some in batched(sorted(request_ids), ENTRIES_PER_TRANSACTION):
            missing |= set(some) - await connection.run_sync(in_tables, some)
    return len(missing)


def _left_beside(database_url: str) -> tuple[list[Journaled], list[Settlement]]:
    """Return what the journal of a stopped appliance holds; nothing for PostgreSQL, which has none."""
    path = _path(database_url)
    return _read([] if path is None else remaining_records(path))


def _read(records: Iterable[bytes]) -> tuple[list[Journaled], list[Settlement]]:
    """Return the entries and the settlements among `records`; those that cannot be read are logged."""
    entries: list[Journaled] = []
    settlements: list[Settlement] = []
    for record in records:
        try:
            item = decode(record)
        except ValueError as error:
            _log.error("a line of the journal cannot be read", error=str(error), record=record.decode(errors="replace"))
            continue
        if isinstance(item, Journaled):
            entries.append(item)
        else:
            settlements.append(item)
    return entries, settlements


async def _put_in_tables(db: Database, entries: Sequence[Journaled]) -> int:
    try:
        return await db.batch_write(_insert_missing, entries)
    except (StatementError, ValueError, OverflowError) as error:
        if not is_bad_row(error):
            raise
        if len(entries) > 1:
            return sum([await _put_in_tables(db, [entry]) for entry in entries])
        # Its tenant or its epoch is missing: the database is older than the journal.
        _log.error("an admitted request fits no longer", error=str(error), record=_ENCODER.encode(entries[0]).decode())
        return 0


def _insert_missing(connection: Connection, entries: Sequence[Journaled]) -> int:
    there = rows.known(connection, [journaled.entry.request_id for journaled in entries])
    missing = [journaled for journaled in entries if journaled.entry.request_id not in there]
    if missing:
        event_rows = [rows.event_row(it.entry, it.epoch_id, it.currency, it.billing_day) for it in missing]
        rows.insert(connection, [journaled.entry for journaled in missing], event_rows)
    return len(missing)


async def _settle(
    db: Database, clock: Clock, calendar: BillingCalendar, settlements: Sequence[Settlement], on_settled: OnSettled | None
) -> int:
    """Settle requests that have not ended, as the ledger would have; those that the tables refuse or do not know are logged."""
    async with db.reading() as connection:
        request_ids = [settlement.request_id for settlement in settlements]
        ended = await connection.run_sync(rows.ended, request_ids)
    missing = [Settle(settlement=settlement) for settlement in settlements if settlement.request_id not in ended]
    work = Round(
        db=db, epoch_id="", currency="", calendar=calendar, now=clock.now(), operations=missing, checkpoints={}, opened={},
        on_settled=on_settled,
    )  # fmt: skip
    await work.write()
    work.report_results()
    return sum(operation.written for operation in missing)
