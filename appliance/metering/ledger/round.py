"""One round of the ledger's writer: a group of operations that are committed together, and the result of each."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import msgspec
import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError, StatementError

from appliance.base import counters
from appliance.base.db import Database
from appliance.base.errors import InternalError
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger import epochs, rollups, rows
from appliance.metering.ledger.records import PendingEvent, Settlement, Usage, UsageEvent

_log = structlog.get_logger()


class LedgerBroken(Exception):
    """A settlement contradicts the ledger, or the ledger can no longer be written. Caused by a bug or a lost database, not by
    input."""


# PostgreSQL: no privilege on the table (its owner was changed), no such table, no such column (it is being restored).
_TABLES_UNAVAILABLE = ("42501", "42P01", "42703")
_BAD_OR_FAILED = (StatementError, ValueError, OverflowError, LedgerBroken)


def is_bad_row(error: Exception) -> bool:
    """Return whether `error` is caused by the operation's values and would recur on every retry, not by the database."""
    if getattr(getattr(error, "orig", None), "sqlstate", None) in _TABLES_UNAVAILABLE:
        return False
    bad = (IntegrityError, DataError, ProgrammingError, ValueError, OverflowError, LedgerBroken)
    return isinstance(error, bad) or type(error) is StatementError  # its subclasses are errors of the driver


@dataclass(slots=True, eq=False, kw_only=True)
class TrackedOperation:
    """An operation whose outcome is reported. Without a `number` its caller waits for `outcome`. With one, it is journaled
    under that record number and the caller has continued; then `outcome` exists only if another task waits for its rows.
    """

    outcome: asyncio.Future[None] | None = None
    number: int | None = None

    def succeed(self) -> None:
        """Report success to the caller if it still waits."""
        if self.outcome is not None and not self.outcome.done():
            self.outcome.set_result(None)

    def fail(self, error: Exception) -> None:
        """Report the error to the caller if it still waits, or log it if the caller has continued."""
        if self.number is not None or self.outcome is None:
            _log.error("the tables rejected a journaled operation", error=str(error.__cause__ or error), operation=repr(self))
            self.succeed()
        elif not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # marks it as retrieved: a cancelled caller never does


@dataclass(slots=True, eq=False, kw_only=True)
class Open(TrackedOperation):
    """Write a pending event. `abandoned`: its caller was cancelled before it was written. `may_exist`: an earlier try may have
    written it."""

    event: PendingEvent
    abandoned: bool = False
    may_exist: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Settle(TrackedOperation):
    """Bring an event to its final state. `written`: it is in the ledger with these figures. `on_recorded` is called once
    the rows are committed, or when they certainly will not be."""

    settlement: Settlement
    written: bool = False
    on_recorded: Callable[[], object] | None = None

    @property
    def request_id(self) -> str:
        return self.settlement.request_id

    def succeed(self) -> None:
        """Also call `on_recorded`."""
        TrackedOperation.succeed(self)
        self._call_on_recorded()

    def fail(self, error: Exception) -> None:
        """Also call `on_recorded`."""
        TrackedOperation.fail(self, error)
        self._call_on_recorded()

    def _call_on_recorded(self) -> None:
        on_recorded, self.on_recorded = self.on_recorded, None
        if on_recorded is not None:
            on_recorded()


@dataclass(slots=True, eq=False)
class Void:
    """Void an event if it exists and is pending: its caller got an error."""

    request_id: str


Operation = Open | Settle | Void
OnSettled = Callable[[Connection, Sequence[UsageEvent]], object]
"""Called with newly settled events, in the transaction that settles them, after they are added to the sums."""


@dataclass(slots=True)
class Round:
    """Operations and checkpoints that are committed together, or each alone if one of them is bad. A checkpoint is what a
    running request would be billed if the process died now.

    `opened` are the pending events written by this process, kept up to date by `report_results`. `errors` are the errors of
    bad operations, by `id(operation)`.
    """

    db: Database
    epoch_id: str
    currency: str
    calendar: BillingCalendar
    now: datetime
    operations: Sequence[Operation]
    checkpoints: Mapping[str, Usage]
    opened: dict[str, rows.Opened]
    on_settled: OnSettled
    inserted: dict[str, rows.Opened] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    async def write(self) -> None:
        """Commit the round. Afterwards `errors` has the error of each bad operation.

        Raises the database's error if nothing can be written now; then it is unknown whether this round was committed. Raises
        EpochEnded if it opens requests in an epoch that has ended.
        """
        if await self._try(self.operations, self.checkpoints) is not None:
            self.errors.clear()
            await self._write_one_by_one()

    async def rehearse(self, event: PendingEvent) -> None:
        """Write the rows of `event` and roll them back. Raises the database's error if no events can be added now."""
        try:
            await self.db.batch_write(self._rehearse, event)
        except _BAD_OR_FAILED as error:
            if not is_bad_row(error):
                raise

    def _rehearse(self, connection: Connection, event: PendingEvent) -> None:
        with connection.begin_nested() as savepoint:
            rows.insert(connection, [event], [self._event_row(event)])
            savepoint.rollback()

    def report_results(self) -> None:
        """Give every caller its result."""
        for operation in self.operations:
            if isinstance(operation, Void):
                self.opened.pop(operation.request_id, None)
                continue
            error = self.errors.get(id(operation))
            if isinstance(operation, Open) and error is None:
                self.opened[operation.event.request_id] = self.inserted[operation.event.request_id]
            elif isinstance(operation, Settle) and operation.written:
                self.opened.pop(operation.request_id, None)
            if error is None:
                operation.succeed()
            else:
                operation.fail(error if isinstance(error, LedgerBroken) else _refusal(operation, error))

    async def _write_one_by_one(self) -> None:
        for operation in self.operations:
            error = await self._try([operation], {})
            if error is not None:
                self.errors[id(operation)] = error
        for request_id, usage in self.checkpoints.items():
            error = await self._try([], {request_id: usage})
            if error is not None:
                _log.error("checkpoint_refused", request_id=request_id, error=str(error))

    async def _try(self, operations: Sequence[Operation], checkpoints: Mapping[str, Usage]) -> Exception | None:
        """Commit only these, and return their error if they are bad."""
        try:
            await self._transaction(operations, checkpoints)
        except _BAD_OR_FAILED as error:
            if not is_bad_row(error):
                raise
            return error
        return None

    async def _transaction(self, operations: Sequence[Operation], checkpoints: Mapping[str, Usage]) -> None:
        if not operations and not checkpoints:
            return
        opens = [operation for operation in operations if isinstance(operation, Open)]
        settles = [operation for operation in operations if isinstance(operation, Settle)]
        voids = [operation.request_id for operation in operations if isinstance(operation, Void)]
        self.inserted |= await self.db.batch_write(self._write, opens, checkpoints, settles, voids)
        for operation in settles:
            operation.written = id(operation) not in self.errors

    def _write(
        self,
        connection: Connection,
        opens: Sequence[Open],
        checkpoints: Mapping[str, Usage],
        settles: Sequence[Settle],
        voids: Sequence[str],
    ) -> dict[str, rows.Opened]:
        """Execute every statement of the transaction, and return the new events."""
        if opens and connection.dialect.name == "postgresql":  # a SQLite file is not taken over while this process lives
            epochs.lock_epoch(connection, self.epoch_id)
        inserted = self._insert(connection, opens) if opens else {}
        if checkpoints:
            rows.WRITE_CHECKPOINTS.execute(connection, [rows.checkpoint_parameters(*each) for each in checkpoints.items()])
        if settles or voids:
            settled = self._settle(connection, settles, voids, ChainMap(inserted, self.opened))
            if settled:
                self.on_settled(connection, settled)
        return inserted

    def _insert(self, connection: Connection, opens: Sequence[Open]) -> dict[str, rows.Opened]:
        new = [(operation.event, self._event_row(operation.event)) for operation in opens]
        may_exist = [operation.event.request_id for operation in opens if operation.may_exist]
        existing = rows.existing(connection, may_exist) if may_exist else ()
        missing = [(event, row) for event, row in new if event.request_id not in existing]
        if missing:
            rows.insert(connection, [event for event, _ in missing], [row for _, row in missing])
        return {event.request_id: rows.Opened(row, event.price) for event, row in new}

    def _event_row(self, event: PendingEvent) -> dict[str, Any]:
        return rows.event_row(event, self.epoch_id, self.currency, self.calendar.day_of(event.admitted_at))

    def _settle(
        self, connection: Connection, settles: Sequence[Settle], voids: Sequence[str], opened: Mapping[str, rows.Opened]
    ) -> list[UsageEvent]:
        request_ids = {operation.settlement.request_id for operation in settles} | set(voids)
        found = rows.find_events(connection, sorted(request_ids), opened)
        changes: dict[str, tuple[UsageEvent, Settlement]] = {}
        for operation in settles:
            error = self._apply(operation.settlement, found, changes)
            if error is not None:
                self.errors[id(operation)] = error
        for request_id in voids:
            rated = found.get(request_id)
            if rated is not None and rated.event.status == "pending" and request_id not in changes:
                self._apply(_void(request_id), found, changes)
        if changes:
            self._assign_postings(connection, changes)
            self._update(connection, [changes[request_id] for request_id in sorted(changes)])
        return [event for event, _ in changes.values()]

    @staticmethod
    def _assign_postings(connection: Connection, changes: dict[str, tuple[UsageEvent, Settlement]]) -> None:
        """Assign posting numbers to the changed events, in the order of the operations."""
        first = counters.take_sync(connection, counters.POSTING, len(changes))
        for posting, (request_id, (event, settlement)) in enumerate(list(changes.items()), first):
            changes[request_id] = (msgspec.structs.replace(event, posting=posting), settlement)

    def _apply(
        self, settlement: Settlement, found: Mapping[str, rows.RatedEvent], changes: dict[str, tuple[UsageEvent, Settlement]]
    ) -> LedgerBroken | None:
        """Add the change made by `settlement`, if any, to `changes`. Return the error of a settlement that is impossible."""
        request_id = settlement.request_id
        if request_id not in found:
            return LedgerBroken(f"request {request_id} has no event to settle")
        event = changes[request_id][0] if request_id in changes else found[request_id].event
        if event.status != "pending":
            if rows.same_outcome(event, settlement):
                return None
            return LedgerBroken(f"request {request_id} was settled as {event.status} with other figures")
        try:
            cost = rows.cost_of(found[request_id].rate, settlement.usage)
        except OverflowError as error:
            return LedgerBroken(str(error))
        changes[request_id] = (rows.settled(event, settlement, cost, self.now), settlement)
        return None

    def _update(self, connection: Connection, changes: Sequence[tuple[UsageEvent, Settlement]]) -> None:
        parameters = [rows.settle_event_parameters(event) for event, _ in changes]
        changed = rows.SETTLE_EVENTS.execute(connection, parameters)
        if changed != len(changes):
            raise LedgerBroken(f"{len(changes)} events were pending and {changed} changed: is there a second writer?")
        details = [rows.settle_request_parameters(settlement, self.now) for _, settlement in changes]
        rows.SETTLE_REQUESTS.execute(connection, details)
        rollups.add(connection, self.calendar, [event for event, _ in changes])


def _void(request_id: str) -> Settlement:
    return Settlement(request_id=request_id, status="voided", finish_reason="refused")


def _refusal(operation: Operation, error: Exception) -> Exception:
    """Return the error for the caller of a bad operation: a refusal for an open, a contradiction for a settlement."""
    if isinstance(operation, Open):
        refusal = InternalError("the database rejected the usage event; nothing was started")
        refusal.__cause__ = error
        return refusal
    broken = LedgerBroken(f"the database rejected the settlement: {error}")
    broken.__cause__ = error
    return broken
