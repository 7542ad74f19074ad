"""The only writer of usage events: a task that commits queued operations in groups, called rounds.

    open, settle ─► journal ─► the caller continues
                       └───► queued ─┐                ┌─► COMMIT ─► their journal records are released
    void, checkpoint ──────► queued ─┴► one round ────┴─► bad row ─► each operation alone, so that only the bad one fails

With a journal (on SQLite) an open or a settlement is durable once its journal record is written. The rows of all operations
that arrived meanwhile follow together in the next round, for which every reader of the tables waits (`catch_up`). Without a
journal the caller waits for the rows.

A settlement is never given up while the process lives. If the journal fails, the caller waits for the rows; if the database
fails, the write is retried: it is a conditional update on `status = 'pending'`, so retrying after a COMMIT of unknown outcome
changes nothing. The rows of a journaled event are retried too. Without a journal, an `open` that fails is refused, and in case
its COMMIT did happen, the event is voided as soon as the database answers again. That does not prove that events can be added:
on a server whose disk is full, a void that finds no event succeeds. So until the rows of a refused event have been written and
rolled back, the failure lasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from appliance.base.awake_time import AwakeStopwatch, done_within
from appliance.base.clock import Clock
from appliance.base.consecutive_failures import ConsecutiveFailures
from appliance.base.db import Database
from appliance.base.errors import InternalError, Overloaded
from appliance.base.journal import Journal
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.journal_records import JournaledEvent, encode
from appliance.metering.ledger.operation_queue import CHECKPOINT_INTERVAL_S, COMBINE_FROM, SETTLE_PAUSE_S, OperationQueue
from appliance.metering.ledger.records import PendingEvent, Settlement, Usage
from appliance.metering.ledger.round import LedgerBroken, OnSettled, Open, Operation, Round, Settle, TrackedOperation, Void
from appliance.metering.ledger.rows import Opened

QUEUED_OPENS_MAX = 4096
RETRY_S_MIN = 0.05
RETRY_S_MAX = 2.0
STOP_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 5.0  # as long as SQLite itself waits for a lock
JOURNAL_TIMEOUT_S = 1.0  # for a settlement: after it, the rows can still be written before the client gets its answer's end
CATCH_UP_S = 1.0
RETRY_AFTER_S = 2.0

_DATABASE_FAILED = (DBAPIError, PoolTimeout, OSError)

_log = structlog.get_logger()


class Ledger:
    """Writes the usage events of one epoch. Call `start` before the first `open`; `stop` drains the queue."""

    def __init__(
        self,
        db: Database,
        clock: Clock,
        epoch_id: str,
        *,
        currency: str,
        calendar: BillingCalendar,
        on_settled: OnSettled,
        checkpoint_interval_s: float = CHECKPOINT_INTERVAL_S,
        queued_opens_max: int = QUEUED_OPENS_MAX,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        settle_pause_s: float = SETTLE_PAUSE_S,
        journal: Journal | None = None,
    ) -> None:
        self.last_error: str | None = None
        self.unrecorded_usage_tokens = 0
        """Tokens of settlements that were given up because the tables rejected them or nothing could be written any more.
        Normally zero."""
        self._db = db
        self._clock = clock
        self._epoch_id = epoch_id
        self._currency = currency
        self._calendar = calendar
        self._on_settled = on_settled
        self._queued_opens_max = queued_opens_max
        self._open_timeout_s = open_timeout_s
        self._journal = journal
        self._queue = OperationQueue(clock, checkpoint_interval_s=checkpoint_interval_s, settle_pause_s=settle_pause_s)
        self._in_round: list[Operation] = []
        self._round_time = AwakeStopwatch()
        self._opened: dict[str, Opened] = {}
        self._refused: PendingEvent | None = None  # the last one whose rows could not be written, until such rows can be
        self._retry_s = 0.0
        self._failed_rounds = ConsecutiveFailures(clock.monotonic_s)
        self._failed_appends = ConsecutiveFailures(clock.monotonic_s)
        self._task: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """Return whether the writer is running and the last writes to tables and journal succeeded."""
        journal_works = self._journal is None or self._journal.last_error is None
        return self._is_running and self._tables_are_writable and journal_works

    @property
    def _tables_are_writable(self) -> bool:
        """Return whether the last round was committed and the current one does not hang."""
        return self.last_error is None and self._round_time.elapsed_s <= self._open_timeout_s

    async def start(self) -> None:
        """Start the writer task."""
        assert self._task is None, "a ledger is started once"
        if self._journal is not None:
            self._db.catch_up = self.catch_up
        self._task = asyncio.create_task(self._run(), name="ledger")

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Write everything queued and stop. Raises LedgerBroken if that is not possible within `timeout_s`."""
        if self._task is None:
            return
        self._queue.close()
        _done, running = await asyncio.wait({self._task}, timeout=timeout_s)
        if running:
            self._task.cancel()
            await asyncio.wait({self._task})
        left = len(self._queue) + len(self._in_round)
        self._fail_all(LedgerBroken("the ledger has stopped"))
        if left:
            raise LedgerBroken(f"the ledger stopped with {left} operations unwritten: {self.last_error}")

    async def open(self, event: PendingEvent) -> None:
        """Return once the pending event is durable. If it raises or is cancelled, no event stays pending.

        Raises Overloaded if the disk or the database fails or times out, or too many operations wait, and InternalError if only
        this event cannot be written.
        """
        self._check_running()
        if len(self._queue) >= self._queued_opens_max:
            raise Overloaded("too many requests are waiting to be recorded", retry_after_s=1.0)
        if self._journal is None:
            await self._open_in_tables(event)
        else:
            await self._open_in_journal(self._journal, event)

    async def _open_in_journal(self, journal: Journal, event: PendingEvent) -> None:
        """Return once the event is in the journal. If cancelled, it may leave a record there that the next start finds."""
        if not self._tables_are_writable:
            raise _unwritable()
        day = self._calendar.day_of(event.admitted_at)
        try:
            record = encode(JournaledEvent(epoch_id=self._epoch_id, currency=self._currency, billing_day=day, event=event))
        except ValueError as error:
            raise InternalError("the usage event cannot be written; nothing was started") from error
        number = await self._append(journal, record, event.request_id, self._open_timeout_s)
        if number is None:
            raise _unwritable()
        try:
            self._check_running()
        except InternalError:
            journal.release([number])
            raise
        self._put(Open(event=event, number=number))

    async def _open_in_tables(self, event: PendingEvent) -> None:
        """Return once the rows of the event are committed."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        operation = Open(event=event, outcome=outcome)
        self._queue.put(operation)
        try:
            if not await done_within(outcome, self._open_timeout_s):
                raise TimeoutError
            await outcome
        except (asyncio.CancelledError, TimeoutError) as error:
            # The caller is gone and it is unknown whether the row was written: the void settles it either way.
            operation.abandoned = True
            self._put(Void(event.request_id))
            if isinstance(error, TimeoutError):
                raise _unwritable() from error
            raise

    async def catch_up(self) -> None:
        """Wait until every operation journaled so far is in the tables; readers of the tables call it first (`Database`).

        It returns anyway while the database fails, or after CATCH_UP_S: such a read misses the latest rows. Only the first
        caller waits that long.
        """
        unwritten = (*self._queue.newest_first(), *reversed(self._in_round))
        journaled = (operation for operation in unwritten if isinstance(operation, TrackedOperation) and operation.number)
        last = next(journaled, None)
        if last is None or not self._is_running or not self._tables_are_writable or self._round_time.elapsed_s > CATCH_UP_S:
            return
        if last.outcome is None:
            last.outcome = asyncio.get_running_loop().create_future()
        self._queue.make_due()
        await done_within(last.outcome, CATCH_UP_S)

    async def settle(self, settlement: Settlement, on_recorded: Callable[[], object] | None = None) -> None:
        """Return once the final state is durable. Idempotent: settling again with the same figures changes nothing.
        `on_recorded` is called once the state is in the tables, possibly later, or when this process will certainly not write
        it.

        Raises LedgerBroken if it has to be given up: there is no such event, it was settled differently, or the ledger has
        stopped. Once the journal record is durable and the caller has continued, such an error is only logged. Cancelling the
        caller does not stop a settlement.
        """
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        operation = Settle(settlement=settlement, outcome=outcome, on_recorded=on_recorded)
        self._queue.drop_checkpoint(settlement.request_id)
        try:
            operation.number = await self._append_settlement(settlement)
        finally:
            self._put(operation)
        if operation.number is None:
            await outcome

    async def _append_settlement(self, settlement: Settlement) -> int | None:
        """Append the settlement to the journal and return its record number; None if it was not journaled: then the caller must
        wait for its rows.

        It is not journaled while the journal fails; nor, as long as rounds succeed, when many operations wait: rounds then
        follow each other closely, and another disk write would only delay them.
        """
        if self._journal is None or self._journal.last_error is not None or self._task is None:
            return None
        many_wait = len(self._queue) + len(self._in_round) >= COMBINE_FROM
        if many_wait and self._tables_are_writable and self._is_running:
            return None
        try:
            record = encode(settlement)
        except ValueError:
            return None  # the tables reject it with the reason
        return await self._append(self._journal, record, settlement.request_id, JOURNAL_TIMEOUT_S)

    async def _append(self, journal: Journal, record: bytes, request_id: str, timeout_s: float) -> int | None:
        """Append to the journal and return the record's number. Return None, and log why, if that fails or takes longer."""
        try:
            number = await journal.append(record, timeout_s)
        except OSError as error:
            if failures := self._failed_appends.count():
                _log.error("ledger_journal_failed", error=repr(error), request_id=request_id, failures=failures)
            return None
        if failures := self._failed_appends.end():
            _log.warning("works again", after="ledger_journal_failed", failures=failures)
        return number

    def checkpoint(self, usages: Mapping[str, Usage]) -> None:
        """Queue checkpoints: what running requests, by id, would be billed if the process died now. The latest of each is
        written at most once per `checkpoint_interval_s`."""
        self._queue.put_checkpoints(usages)

    @property
    def _is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def _check_running(self) -> None:
        if not self._is_running or self._queue.closing:
            raise InternalError("the ledger is not running; usage cannot be recorded")

    def _put(self, operation: Operation) -> None:
        if not self._is_running:
            self._give_up(operation, LedgerBroken("the ledger has stopped"))
            return
        self._queue.put(operation)

    async def _run(self) -> None:
        """Write rounds until stopped. An unexpected error ends the task: the gateway is no longer ready, and callers get an
        error."""
        try:
            while not (self._queue.closing and self._queue.is_empty):
                await self._wait()
                await self._write_round()
        except Exception as error:  # noqa: BLE001 - an owned task reports how it ended
            self.last_error = f"the writer ended: {error!r}"
            _log.exception("ledger_writer_ended", epoch_id=self._epoch_id)
            self._fail_all(LedgerBroken(self.last_error))

    async def _wait(self) -> None:
        """Wait until there is something to write, or after a failed round for the retry delay."""
        if self._retry_s:
            await asyncio.sleep(self._retry_s)
            return
        await self._queue.wait_until_due()

    async def _write_round(self) -> None:
        operations, checkpoints = self._queue.take()
        self._in_round = operations
        if not operations and not checkpoints and self._refused is None:
            return  # nothing is due (a failed round may have left only checkpoints): `last_error` stays
        current = Round(
            db=self._db,
            epoch_id=self._epoch_id,
            currency=self._currency,
            calendar=self._calendar,
            now=self._clock.now(),
            operations=operations,
            checkpoints=checkpoints,
            opened=self._opened,
            on_settled=self._on_settled,
        )
        self._round_time.start()
        try:
            await current.write()
        except _DATABASE_FAILED as error:
            self._note_failure(error, len(operations))
            self._keep_for_retry(operations, checkpoints)
            self._in_round = []
            return
        finally:
            self._round_time.stop()
        current.report_results()
        for operation in operations:
            if isinstance(operation, Settle) and not operation.written:
                self.unrecorded_usage_tokens += operation.settlement.usage.total_tokens
        if self._journal is not None:
            self._journal.release(
                operation.number for operation in operations if isinstance(operation, TrackedOperation) and operation.number
            )
        self._in_round = []
        await self._end_failure(current)

    async def _end_failure(self, current: Round) -> None:
        """After a round that succeeded, end the failure of earlier ones, unless events could still not be added."""
        if self._refused is not None:
            try:
                await current.rehearse(self._refused)
            except _DATABASE_FAILED as error:
                self._note_failure(error, 0)
                return
            self._refused = None
        self.last_error = None
        self._retry_s = 0.0
        if failures := self._failed_rounds.end():
            _log.warning("works again", after="ledger_round_failed", failures=failures)

    def _note_failure(self, error: Exception, num_operations: int) -> None:
        self.last_error = f"{type(error).__name__}: {error}"
        self._retry_s = min(max(self._retry_s * 2, RETRY_S_MIN), RETRY_S_MAX)
        if failures := self._failed_rounds.count():
            facts = {"error": self.last_error, "operations": num_operations, "retry_s": self._retry_s, "failures": failures}
            _log.error("ledger_round_failed", **facts)

    def _keep_for_retry(self, operations: list[Operation], checkpoints: Mapping[str, Usage]) -> None:
        """After a database failure, refuse the opens whose callers wait and keep the other operations, in order, for a
        retry."""
        kept: list[Operation] = []
        for operation in operations:
            if isinstance(operation, Open) and operation.number is None:
                self._refused = operation.event
                operation.fail(_unwritable())
                kept.append(Void(operation.event.request_id))
                continue
            if isinstance(operation, Open):
                operation.may_exist = True
            kept.append(operation)
        self._queue.put_back(kept, checkpoints)

    def _fail_all(self, error: LedgerBroken) -> None:
        """Fail every queued operation and those of an interrupted round."""
        for operation in (*self._in_round, *self._queue.take_all()):
            self._give_up(operation, error)
        self._in_round = []

    def _give_up(self, operation: Operation, error: LedgerBroken) -> None:
        if isinstance(operation, Void):
            return
        if operation.number is not None:
            operation.succeed()  # the next start replays it from the journal
            return
        operation.fail(error)
        if isinstance(operation, Settle):
            self.unrecorded_usage_tokens += operation.settlement.usage.total_tokens


def _unwritable() -> Overloaded:
    return Overloaded("the usage event could not be written; nothing was started", retry_after_s=RETRY_AFTER_S)
