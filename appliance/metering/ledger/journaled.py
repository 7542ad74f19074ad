"""Pending entries in the journal: how they are written there, and how a start brings what a dead process left into the tables.

On SQLite a request waits for its line in the journal instead of its rows in the database, which have ten indexes to keep and
wait for whoever writes at the moment. The file lies beside the database and is as durable. Its rows follow within a moment.
A start may be that of a later version: fields that entries get must have defaults.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import msgspec
import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import StatementError
from sqlalchemy.ext.asyncio import AsyncConnection

from appliance.base.db import Database, parse_url
from appliance.base.journal import Journal, left_in
from appliance.metering.ledger import rows
from appliance.metering.ledger.records import PendingEntry
from appliance.metering.ledger.round import is_bad_row

ENTRIES_PER_TRANSACTION = 200
SUFFIX = ".admitted"
INTEGER_MAX = 2**63 - 1

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Journaled:
    """A pending entry with what its rows say besides. `currency` is the box's, for where neither price nor tenant says it."""

    epoch_id: str
    currency: str
    billing_day: date
    entry: PendingEntry


def journal_beside(database_url: str) -> Journal | None:
    """Open the journal of a SQLite database; PostgreSQL, whose disk is another one, has none. Raises OSError."""
    path = _path(database_url)
    return None if path is None else Journal(path)


def _path(database_url: str) -> Path | None:
    """Return where the journal lies: beside the file itself, as SQLite's own companions, whatever links lead there."""
    kind, target = parse_url(database_url)
    return Path(f"{os.path.realpath(str(target.database))}{SUFFIX}") if kind == "sqlite" else None


def encode(journaled: Journaled) -> bytes:
    """Return the record of an entry. Raises ValueError for what no table takes: a text that is not Unicode, a huge count."""
    if max(journaled.entry.prompt_tokens, journaled.entry.reserved_tokens) > INTEGER_MAX:
        raise ValueError("a count of tokens does not fit 64 bits")
    return _ENCODER.encode(journaled)


def decode(record: bytes) -> Journaled:
    """Return the entry of a record. Raises ValueError."""
    return _DECODER.decode(record)


_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(Journaled)


async def replay(db: Database, journal: Journal) -> int:
    """Bring the entries that a dead process left in `journal` into the tables, and return how many were missing there.

    Call it before `recover`, which settles them. Raises OSError, or the database's error when it cannot be written; nothing is
    lost then.
    """
    left = [found for record in journal.read_left() if (found := _read(record)) is not None]
    count = 0
    for first in range(0, len(left), ENTRIES_PER_TRANSACTION):
        count += await _put_in_tables(db, left[first : first + ENTRIES_PER_TRANSACTION])
    journal.clear()
    return count


async def only_in_journal(connection: AsyncConnection, database_url: str) -> int:
    """Return how many entries a stopped appliance has left in its journal and not in the tables. Raises OSError."""
    path = _path(database_url)
    left = [] if path is None else [found for record in left_in(path) if (found := _read(record)) is not None]
    request_ids = [journaled.entry.request_id for journaled in left]
    count = len(request_ids)
    for first in range(0, len(request_ids), ENTRIES_PER_TRANSACTION):
        count -= len(await connection.run_sync(rows.known, request_ids[first : first + ENTRIES_PER_TRANSACTION]))
    return count


def _read(record: bytes) -> Journaled | None:
    try:
        return decode(record)
    except ValueError as error:
        _log.error(
            "an admitted request in the journal cannot be read", error=str(error), record=record.decode(errors="replace")
        )
        return None


async def _put_in_tables(db: Database, entries: Sequence[Journaled]) -> int:
    try:
        return await db.batch_write(_insert_missing, entries)
    except (StatementError, ValueError, OverflowError) as error:
        if not is_bad_row(error):
            raise
        if len(entries) > 1:
            return sum([await _put_in_tables(db, [entry]) for entry in entries])
        # Its tenant or its epoch is not there: the database is an older one than the journal.
        _log.error("an admitted request fits no longer", error=str(error), record=_ENCODER.encode(entries[0]).decode())
        return 0


def _insert_missing(connection: Connection, entries: Sequence[Journaled]) -> int:
    there = rows.known(connection, [journaled.entry.request_id for journaled in entries])
    missing = [journaled for journaled in entries if journaled.entry.request_id not in there]
    if missing:
        event_rows = [rows.event_row(it.entry, it.epoch_id, it.currency, it.billing_day) for it in missing]
        rows.insert(connection, [journaled.entry for journaled in missing], event_rows)
    return len(missing)
