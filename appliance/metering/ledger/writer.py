"""The only writer of usage events: a task that takes what is queued and commits it in groups.

    open, settle ─► journal ─► the caller goes on
                       └───► waiting ─┐                ┌─► COMMIT ─► the journal may forget it
    void, checkpoint ──────► waiting ─┴► one round ────┴─► error ─► each operation alone, so that one bad row fails alone

With a journal (on SQLite) an open or a settlement is durable as soon as its line is. The rows of all that came meanwhile follow
together in the next round, for which every reader of the tables waits (`caught_up`). Without a journal the caller waits for the
rows.

A settlement is never given up while the process lives. If the journal fails, it waits for its rows; if the database fails, it
is tried again: it is a conditional update on `status = 'pending'`, so a second try after a COMMIT of unknown outcome changes
nothing. The rows of an entry in the journal are tried again too. An `open` without a journal that fails is refused, and in case
its COMMIT did happen, the entry is voided as soon as the database answers again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

import structlog
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from appliance.base.clock import Clock
from appliance.base.db import Database
from appliance.base.errors import InternalError, Overloaded
from appliance.base.journal import Journal
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.journaled import Journaled, encode
from appliance.metering.ledger.records import PendingEntry, Settlement, Usage
from appliance.metering.ledger.round import LedgerBroken, OnSettled, Open, Operation, Round, Settle, TrackedOperation, Void
from appliance.metering.ledger.rows import Opened
from appliance.metering.ledger.waiting import CHECKPOINT_INTERVAL_S, SETTLE_PAUSE_S, TOGETHER_FROM, Waiting

QUEUED_OPENS_MAX = 4096
RETRY_S_MIN = 0.05
RETRY_S_MAX = 2.0
STOP_TIMEOUT_S = 10.0
OPEN_TIMEOUT_S = 5.0  # as long as SQLite itself waits for a lock
LINE_TIMEOUT_S = 1.0  # for a settlement, whose rows can still come before the client is told that its answer has ended
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
        currency: str,
        calendar: BillingCalendar,
        on_settled: OnSettled | None = None,
        checkpoint_interval_s: float = CHECKPOINT_INTERVAL_S,
        queued_opens_max: int = QUEUED_OPENS_MAX,
        open_timeout_s: float = OPEN_TIMEOUT_S,
        settle_pause_s: float = SETTLE_PAUSE_S,
        journal: Journal | None = None,
    ) -> None:
        self.last_error: str | None = None
        self.unrecorded_usage_tokens = 0
        """Tokens of settlements that had to be given up because the tables refused them or nothing could be written any more:
        zero when all is well."""
        self._db = db
        self._clock = clock
        self._epoch_id = epoch_id
        self._currency = currency
        self._calendar = calendar
        self._on_settled = on_settled
        self._queued_opens_max = queued_opens_max
        self._open_timeout_s = open_timeout_s
        self._journal = journal
        self._waiting = Waiting(clock, checkpoint_interval_s=checkpoint_interval_s, settle_pause_s=settle_pause_s)
        self._in_round: list[Operation] = []
        self._in_round_since_s: float | None = None
        self._opened: dict[str, Opened] = {}
        self._retry_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def healthy(self) -> bool:
        """Return whether the writer runs, and the last writes to tables and journal succeeded."""
        journal_works = self._journal is None or self._journal.last_error is None
        return self._runs and self._tables_work and journal_works

    @property
    def _tables_work(self) -> bool:
        """Return whether the last round was committed, and a running one does not hang."""
        return self.last_error is None and not self._round_lasts(self._open_timeout_s)

    def _round_lasts(self, longer_than_s: float) -> bool:
        since_s = self._in_round_since_s
        return since_s is not None and time.monotonic() - since_s > longer_than_s

    async def start(self) -> None:
        """Start the writer task."""
        assert self._task is None, "a ledger is started once"
        if self._journal is not None:
            self._db.catch_up = self.caught_up
        self._task = asyncio.create_task(self._run(), name="ledger")

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Write what is queued and end. Raises LedgerBroken when that is not possible within `timeout_s`."""
        if self._task is None:
            return
        self._waiting.close()
        _done, running = await asyncio.wait({self._task}, timeout=timeout_s)
        if running:
            self._task.cancel()
            await asyncio.wait({self._task})
        left = len(self._waiting) + len(self._in_round)
        self._fail_all(LedgerBroken("the ledger has stopped"))
        if left:
            raise LedgerBroken(f"the ledger stopped with {left} operations unwritten: {self.last_error}")

    async def open(self, entry: PendingEntry) -> None:
        """Return once the pending entry is durable. When it raises, or is cancelled, no entry stays pending.

        Raises Overloaded when the disk or the database fails or does not answer in time, or too many wait, and InternalError
        when this entry alone cannot be written.
        """
        self._check_running()
        if len(self._waiting) >= self._queued_opens_max:
            raise Overloaded("too many requests are waiting to be recorded", retry_after_s=1.0)
        if self._journal is None:
            await self._open_in_tables(entry)
        else:
            await self._open_in(self._journal, entry)

    async def _open_in(self, journal: Journal, entry: PendingEntry) -> None:
        """Return once the entry is in the journal. If cancelled, it leaves a line there that a start may find."""
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
        self._put(Open(entry=entry, number=number))

    async def _open_in_tables(self, entry: PendingEntry) -> None:
        """Return once the rows of the entry are committed."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        operation = Open(entry=entry, outcome=outcome)
        self._waiting.put(operation)
        try:
            async with asyncio.timeout(self._open_timeout_s):
                await outcome
        except (asyncio.CancelledError, TimeoutError) as error:
            # The caller is gone and does not know whether the row was written: the void settles it either way.
            operation.abandoned = True
            self._put(Void(entry.request_id))
            if isinstance(error, TimeoutError):
                raise _unwritable() from error
            raise

    async def caught_up(self) -> None:
        """Return when all that was promised before is in the tables; every reader of the tables calls it first (`Database`).

        While the database fails, or takes longer than CATCH_UP_S, it returns anyway: what is read then lacks the latest rows.
        Only the first caller waits that long.
        """
        behind = (*self._waiting.newest_first(), *reversed(self._in_round))
        last = next((operation for operation in behind if isinstance(operation, TrackedOperation) and operation.number), None)
        if last is None or not self._runs or not self._tables_work or self._round_lasts(CATCH_UP_S):
            return
        if last.outcome is None:
            last.outcome = asyncio.get_running_loop().create_future()
        self._waiting.make_due()
        await asyncio.wait({last.outcome}, timeout=CATCH_UP_S)

    async def settle(self, settlement: Settlement, on_recorded: Callable[[], object] | None = None) -> None:
        """Return once the final state is durable; settling again with the same figures changes nothing. `on_recorded` is called
        when it is in the tables, which may be later, or when it is certain that this process will not write it there.

        Raises LedgerBroken when it has to be given up: there is no such entry, it was settled differently, or the ledger has
        ended. If the line was durable and the caller has gone on, the error is only logged. Cancelling the caller does not stop
        a settlement.
        """
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        operation = Settle(settlement=settlement, outcome=outcome, on_recorded=on_recorded)
        self._waiting.drop_checkpoint(settlement.request_id)
        try:
            operation.number = await self._line_of(settlement)
        finally:
            self._put(operation)
        if operation.number is None:
            await outcome

    async def _line_of(self, settlement: Settlement) -> int | None:
        """Write the settlement to the journal and return the number of its line; None without one: then the caller must wait
        for its rows.

        When many operations wait, rounds follow each other closely and another write to the disk would only delay them, so no
        line is written, unless the tables fail or the writer has ended. Nor is one written while the journal fails.
        """
        if self._journal is None or self._journal.last_error is not None or self._task is None:
            return None
        many_wait = len(self._waiting) + len(self._in_round) >= TOGETHER_FROM
        if many_wait and self._tables_work and self._runs:
            return None
        try:
            async with asyncio.timeout(LINE_TIMEOUT_S):
                return await self._journal.append(encode(settlement))
        except (OSError, TimeoutError, ValueError) as error:
            _log.error("ledger_journal_failed", error=repr(error), request_id=settlement.request_id)
            return None

    def checkpoint(self, usages: Mapping[str, Usage]) -> None:
        """Queue what running requests, by id, would be billed if the process died now; the latest of each is written about once
        a second."""
        self._waiting.put_checkpoints(usages)

    @property
    def _runs(self) -> bool:
        return self._task is not None and not self._task.done()

    def _check_running(self) -> None:
        if not self._runs or self._waiting.closing:
            raise InternalError("the ledger is not running; nothing can be recorded")

    def _put(self, operation: Operation) -> None:
        if not self._runs:
            self._give_up(operation, LedgerBroken("the ledger has stopped"))
            return
        self._waiting.put(operation)

    async def _run(self) -> None:
        """Write rounds until stopped. A bug in here ends the task: the gateway is no longer ready, and callers get an error."""
        try:
            while not (self._waiting.closing and self._waiting.is_empty):
                await self._wait()
                await self._write_round()
        except Exception as error:  # noqa: BLE001 - an owned task says how it ended
            self.last_error = f"the writer ended: {error!r}"
            _log.exception("ledger_writer_ended", epoch_id=self._epoch_id)
            self._fail_all(LedgerBroken(self.last_error))

    async def _wait(self) -> None:
        """Return when there is something to write, but after a failed round not before the pause has passed."""
        if self._retry_s:
            await asyncio.sleep(self._retry_s)
            return
        await self._waiting.wait_until_due()

    async def _write_round(self) -> None:
        operations, checkpoints = self._waiting.take()
        self._in_round = operations
        if not operations and not checkpoints:
            return  # nothing is due (a failed round may have left only checkpoints): says nothing of the database
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
        work.report_results()
        for operation in operations:
            if isinstance(operation, Settle) and not operation.written:
                self.unrecorded_usage_tokens += operation.settlement.usage.total_tokens
        if self._journal is not None:
            self._journal.release(
                operation.number for operation in operations if isinstance(operation, TrackedOperation) and operation.number
            )
        self._in_round = []

    def _keep_for_retry(self, operations: list[Operation], checkpoints: Mapping[str, Usage], error: Exception) -> None:
        """After a failure of the database, refuse opens whose callers wait, and keep the rest for the next round, in order."""
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
        self._waiting.put_back(kept, checkpoints)

    def _fail_all(self, error: LedgerBroken) -> None:
        """Fail every waiting operation, also those that a round had taken when it ended."""
        for operation in (*self._in_round, *self._waiting.take_all()):
            self._give_up(operation, error)
        self._in_round = []

    def _give_up(self, operation: Operation, error: LedgerBroken) -> None:
        if isinstance(operation, Void):
            return
        if operation.number is not None:
            operation.succeed()  # a start finds it in the journal
            return
        operation.fail(error)
        if isinstance(operation, Settle):
            self.unrecorded_usage_tokens += operation.settlement.usage.total_tokens


def _unwritable() -> Overloaded:
    return Overloaded("the usage record could not be written; nothing was started", retry_after_s=RETRY_AFTER_S)
