"""The one writer of usage events: a task that takes what is queued and commits it in groups. Nobody else writes them.

    open ─► journal ─► the caller goes on
              └─── inbox ─┐                       ┌─► COMMIT ─► every waiting caller hears that its rows are durable
    settle, void ─ inbox ─┴► one round = one transaction
    checkpoint ────┘ (latest wins, once a second) └─► error ─► each operation alone, so that one bad row fails alone

With a journal (on SQLite) an open is durable as soon as its line is, and its rows follow with the next round. Without one its
caller waits for its rows: then opens have rounds of their own, because somebody waits for them and a settlement costs several
times as much; but all go together when many wait, as fewer rounds are less work. What nobody waits for urgently waits a moment
for others of its kind, since a round of several costs little more than one of one.

A settlement is never given up while the process lives: when the database fails it is tried again, and as it is a conditional
update on `status = 'pending'` a second try after a COMMIT of unknown outcome changes nothing. So are the rows of an entry in
the journal. An `open` without one that fails is refused, and in case its COMMIT did happen the entry is voided as soon as the
database answers again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import InternalError, Overloaded
from appliance.base.journal import Journal
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.journaled import Journaled, encode
from appliance.metering.ledger.records import Checkpoint, PendingEntry, RequestRecord, Settlement, Usage, UsageEvent
from appliance.metering.ledger.round import LedgerBroken, OnSettled, Open, Operation, Round, Settle, Void
from appliance.metering.ledger.rows import Opened

__all__ = [
    "Checkpoint",
    "Ledger",
    "LedgerBroken",
    "PendingEntry",
    "RequestRecord",
    "Settlement",
    "Usage",
    "UsageEvent",
]

T = TypeVar("T")

QUEUED_OPENS_MAX = 4096
ROUND_OPERATIONS_MAX = 256
TOGETHER_FROM = 24
SETTLE_PAUSE_S = 0.001  # what a settlement waits for others; longer, and answers end together and come back together
OPEN_PAUSE_S = 0.02  # what the rows of an entry in the journal wait
CHECKPOINT_INTERVAL_S = 0.5  # at least; requests say how far they are once a second, and that is to be written as it comes
RETRY_S_MIN = 0.05
RETRY_S_MAX = 2.0
STOP_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 5.0  # as long as SQLite itself waits for a lock
CATCH_UP_S = 1.0
RETRY_AFTER_S = 2.0

_log = structlog.get_logger()


class Ledger:
    """Writes the usage events of one epoch. `start` before the first `open`, `stop` drains."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        epoch_id: str,
        *,
        currency: str = "EUR",
        calendar: BillingCalendar | None = None,
        on_settled: OnSettled | None = None,
        checkpoint_interval_s: float = CHECKPOINT_INTERVAL_S,
        queued_opens_max: int = QUEUED_OPENS_MAX,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        settle_pause_s: float = SETTLE_PAUSE_S,
        journal: Journal | None = None,
    ) -> None:
        self.last_error: str | None = None
        self.unrecorded_usage_tokens = 0
        """Tokens that the engine reported at settlement and that stand in no committed event: zero when all is well."""
        self._db = db
        self._clock = clock
        self._epoch_id = epoch_id
        self._currency = currency
        self._calendar = calendar or BillingCalendar()
        self._on_settled = on_settled
        self._checkpoint_interval_s = checkpoint_interval_s
        self._queued_opens_max = queued_opens_max
        self._open_timeout_s = open_timeout_s
        self._settle_pause_s = settle_pause_s
        self._journal = journal
        self._inbox_due_s = 0.0
        self._opens: deque[Open] = deque()
        self._inbox: deque[Operation] = deque()
        self._opens_alone = False
        self._in_round: list[Operation] = []
        self._in_round_since_s: float | None = None
        self._opened: dict[str, Opened] = {}
        self._checkpoints: dict[str, Checkpoint] = {}
        self._checkpoints_due_s = 0.0
        self._wake = asyncio.Event()
        self._stopping = False
        self._retry_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """Return whether the writer runs, and what was last written to tables and journal is there."""
        journal_works = self._journal is None or self._journal.last_error is None
        return self._task is not None and not self._task.done() and self._tables_work and journal_works

    @property
    def _tables_work(self) -> bool:
        """Return whether the last round was committed, and one that runs now does not hang."""
        since_s = self._in_round_since_s
        hangs = since_s is not None and time.monotonic() - since_s > self._open_timeout_s
        return self.last_error is None and not hangs

    async def start(self) -> None:
        """Start the writer task."""
        assert self._task is None, "a ledger is started once"
        self._task = asyncio.create_task(self._run(), name="ledger")

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Write what is queued and end. Raises LedgerBroken when that was not possible in `timeout_s`."""
        if self._task is None:
            return
        self._stopping = True
        self._wake.set()
        _done, running = await asyncio.wait({self._task}, timeout=timeout_s)
        if running:
            self._task.cancel()
            await asyncio.wait({self._task})
        left = len(self._opens) + len(self._inbox) + len(self._in_round)
        self._fail_all(LedgerBroken("the ledger has stopped"))
        if left:
            raise LedgerBroken(f"the ledger stopped with {left} operations unwritten: {self.last_error}")

    async def open(self, entry: PendingEntry) -> None:
        """Return once the pending entry is durable. When it raises, or is cancelled, no entry stays pending.

        Raises Overloaded when the disk or the database fails or does not answer in time, or too many wait, and InternalError
        when this entry alone cannot be written.
        """
        self._check_running()
        if len(self._opens) + len(self._inbox) >= self._queued_opens_max:
            raise Overloaded("too many requests are waiting to be recorded", retry_after_s=1.0)
        if self._journal is None:
            await self._open_in_tables(entry)
        else:
            await self._open_in(self._journal, entry)

    async def _open_in(self, journal: Journal, entry: PendingEntry) -> None:
        """Return once the entry stands in the journal. Whoever is cancelled leaves a line there that a start may find."""
        if not self._tables_work:
            raise _unwritable()
        day = self._calendar.day_of(entry.admitted_at)
        try:
            record = encode(Journaled(epoch_id=self._epoch_id, currency=self._currency, billing_day=day, entry=entry))
        except ValueError as error:
            raise InternalError("the usage record cannot be written; nothing was started") from error
        try:
            async with asyncio.timeout(self._open_timeout_s):
                number = await journal.append(record)
        except (OSError, TimeoutError) as error:
            _log.error("ledger_journal_failed", error=repr(error), request_id=entry.request_id)
            raise _unwritable() from error
        try:
            self._check_running()
        except InternalError:
            journal.release([number])
            raise
        self._put(Open(entry, None, number))

    async def _open_in_tables(self, entry: PendingEntry) -> None:
        """Return once the rows of the entry are committed."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        operation = Open(entry, done)
        self._opens.append(operation)
        self._wake.set()
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await done
        except (asyncio.CancelledError, TimeoutError) as error:
            # Nobody waits any more between asking and hearing; whether the row was written is decided here.
            operation.abandoned = True
            self._put(Void(entry.request_id))
            if isinstance(error, TimeoutError):
                raise _unwritable() from error
            raise

    async def caught_up(self) -> None:
        """Return when the rows of all entries opened before are in the tables: who reads pending rows asks for it first.

        While the database fails, or takes longer than CATCH_UP_S, it returns without: what is read then lacks the latest.
        """
        behind = (*reversed(self._inbox), *reversed(self._in_round))
        last = next((operation for operation in behind if isinstance(operation, Open) and operation.number is not None), None)
        if last is None or not self._tables_work:
            return
        if last.done is None:
            last.done = asyncio.get_running_loop().create_future()
        self._inbox_due_s = 0.0
        self._wake.set()
        await asyncio.wait({last.done}, timeout=CATCH_UP_S)

    async def settle(self, settlement: Settlement) -> UsageEvent:
        """Return the event once its final state is durable; settling again with the same figures returns it again.

        Raises LedgerBroken when there is no such entry or it was settled otherwise. Cancelling the caller does not stop it.
        """
        self._check_running()
        operation = Settle(settlement, asyncio.get_running_loop().create_future())
        self._checkpoints.pop(settlement.request_id, None)
        self.unrecorded_usage_tokens += settlement.usage.total_tokens
        self._put(operation)
        return await operation.done

    def checkpoint(self, rows: Sequence[Checkpoint]) -> None:
        """Remember how far running requests are; the latest of each is written about once a second."""
        self._checkpoints.update((row.request_id, row) for row in rows)
        self._wake.set()

    def _check_running(self) -> None:
        if self._task is None or self._task.done() or self._stopping:
            raise InternalError("the ledger is not running; nothing can be recorded")

    def _put(self, operation: Operation) -> None:
        pause_s = OPEN_PAUSE_S if isinstance(operation, Open) else self._settle_pause_s
        due_s = asyncio.get_running_loop().time() + pause_s
        self._inbox_due_s = min(self._inbox_due_s, due_s) if self._inbox else due_s
        self._inbox.append(operation)
        self._wake.set()

    async def _run(self) -> None:
        """Write rounds until stopped. A bug in here ends the task, which turns readiness red; callers get an error."""
        try:
            while not (self._stopping and not self._opens and not self._inbox and not self._checkpoints):
                await self._wait()
                await self._write_round()
        except Exception as error:  # noqa: BLE001 - an owned task says how it ended
            self.last_error = f"the writer ended: {error!r}"
            _log.exception("ledger_writer_ended", epoch_id=self._epoch_id)
            self._fail_all(LedgerBroken(self.last_error))

    async def _wait(self) -> None:
        """Return when there is something to write; after a failed round not before the pause has passed."""
        if self._retry_s:
            await asyncio.sleep(self._retry_s)
            return
        while not self._opens and not self._stopping:
            self._wake.clear()
            pause_s = self._pause_s()
            if pause_s is not None and pause_s <= 0:
                return
            try:
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            except TimeoutError:
                return

    def _pause_s(self) -> float | None:
        """Return how long what waits may go on waiting, if no open comes; None when nothing waits."""
        pauses_s: list[float] = []
        if self._inbox:
            pauses_s.append(self._inbox_due_s - asyncio.get_running_loop().time())
        if self._checkpoints:
            pauses_s.append(self._checkpoints_due_s - self._clock.monotonic_s())
        return min(pauses_s, default=None)

    async def _write_round(self) -> None:
        operations = self._in_round = self._take_operations()
        checkpoints = self._take_checkpoints()
        if not operations and not checkpoints:
            return  # nothing is due, of which a failed round's checkpoints may be the rest: no word on the database's health
        now = self._clock.now()
        work = Round(
            db=self._db,
            epoch_id=self._epoch_id,
            currency=self._currency,
            calendar=self._calendar,
            now=now,
            operations=operations,
            checkpoints=checkpoints,
            opened=self._opened,
            on_settled=self._on_settled,
        )
        self._in_round_since_s = time.monotonic()
        try:
            await work.write()
        except (DBAPIError, PoolTimeout, OSError) as error:
            self._keep_for_retry(operations, checkpoints, error)
            self._in_round = []
            return
        finally:
            self._in_round_since_s = None
        self.last_error = None
        self._retry_s = 0.0
        for operation in operations:
            if isinstance(operation, Settle) and operation.written:
                self.unrecorded_usage_tokens -= operation.settlement.usage.total_tokens
        work.tell()
        if self._journal is not None:
            self._journal.release(
                operation.number for operation in operations if isinstance(operation, Open) and operation.number is not None
            )
        self._in_round = []

    def _take_operations(self) -> list[Operation]:
        """Return what the next round writes: opens, or the rest, by turns while both wait, or both when many wait.

        An open that was abandoned is dropped here, so a void of it that comes before it finds nothing to do.
        """
        others_wait = self._inbox_is_due() or self._checkpoints_are_due()
        together = len(self._opens) + len(self._inbox) >= TOGETHER_FROM
        opens_wait = bool(self._opens)
        self._opens_alone = opens_wait and not (others_wait and (together or self._opens_alone))
        operations: list[Operation] = []
        if self._opens_alone or together:
            operations += [operation for operation in _first(self._opens) if not operation.abandoned]
        if not self._opens_alone:
            others = _first(self._inbox)
            operations += others
        return operations

    def _inbox_is_due(self) -> bool:
        late = self._stopping or asyncio.get_running_loop().time() >= self._inbox_due_s
        return bool(self._inbox) and late

    def _checkpoints_are_due(self) -> bool:
        return bool(self._checkpoints) and (self._stopping or self._clock.monotonic_s() >= self._checkpoints_due_s)

    def _take_checkpoints(self) -> list[Checkpoint]:
        if self._opens_alone or not self._checkpoints_are_due():
            return []
        self._checkpoints_due_s = self._clock.monotonic_s() + self._checkpoint_interval_s
        without_rows = {operation.entry.request_id for operation in self._inbox if isinstance(operation, Open)}
        rows = [row for name, row in sorted(self._checkpoints.items()) if name not in without_rows]
        self._checkpoints = {name: row for name, row in self._checkpoints.items() if name in without_rows}
        return rows

    def _keep_for_retry(self, operations: list[Operation], checkpoints: list[Checkpoint], error: Exception) -> None:
        """The database failed: refuse the opens that somebody waits for, keep the rest for the next round, in order."""
        self.last_error = f"{type(error).__name__}: {error}"
        _log.error("ledger_round_failed", error=self.last_error, operations=len(operations), retry_s=self._retry_s)
        self._retry_s = min(max(self._retry_s * 2, RETRY_S_MIN), RETRY_S_MAX)
        kept: list[Operation] = []
        for operation in operations:
            if isinstance(operation, Open) and operation.number is None:
                operation.fail(_unwritable())
                kept.append(Void(operation.entry.request_id))
                continue
            if isinstance(operation, Open):
                operation.again = True
            kept.append(operation)
        self._inbox.extendleft(reversed(kept))
        settling = {operation.settlement.request_id for operation in self._inbox if isinstance(operation, Settle)}
        for row in checkpoints:
            if row.request_id not in settling:
                self._checkpoints.setdefault(row.request_id, row)

    def _fail_all(self, error: LedgerBroken) -> None:
        """Tell every caller that waits, also those whose operations a round had taken when it ended."""
        for operation in (*self._in_round, *self._opens, *self._inbox):
            if isinstance(operation, Open) and operation.number is not None:
                operation.succeed()  # a start finds it in the journal
            elif not isinstance(operation, Void):
                operation.fail(error)
        self._in_round = []
        self._opens.clear()
        self._inbox.clear()


def _first(waiting: deque[T]) -> list[T]:
    """Take the operations of one round."""
    return [waiting.popleft() for _ in range(min(len(waiting), ROUND_OPERATIONS_MAX))]


def _unwritable() -> Overloaded:
    return Overloaded("the usage record could not be written; nothing was started", retry_after_s=RETRY_AFTER_S)
