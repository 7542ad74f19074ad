"""Loads allowances on first use since the start: past usage is read from the ledger before any request counts towards them.

    requested ─► queued ─► read in one batch with all that were queued ─► loaded
                            └─ the read failed ─► each owner is read alone ─┬► loaded
                                                                            └► waiters get the error; a later request retries

One batch is read at a time; after a failed batch its owners are read concurrently. Requests that arrive meanwhile share the
next batch, so a start under load takes a few reads instead of one for each key. The read runs in a task of its own: cancelling
one waiting request does not affect the others.

A request that was running before its owner was loaded, or that ends during the read, counts exactly once:

    running ─► settled, not yet recorded ─► recorded: part of every later read
     └ held     └ the read returns which of these its snapshot includes; the others are added here
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import structlog

from appliance.base.database_errors import is_outage
from appliance.base.errors import InternalError
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.limits.allowances import Allowance, Hold
from appliance.metering.limits.owners import Owner, owners_of
from appliance.metering.limits.reservations import Reservation
from appliance.metering.limits.rules import Rule
from appliance.metering.limits.running_requests import RunningRequests
from appliance.metering.limits.sums import PeriodSums, SumsReader
from appliance.metering.limits.windows import Moment

OWNERS_PER_READ = 64

_log = structlog.get_logger()


class AllowanceLoader:
    """Creates missing allowances and adds them to `loaded`. Belongs to one event loop."""

    def __init__(
        self, sums: SumsReader, loaded: dict[Owner, Allowance], running: RunningRequests, moment: Callable[[], Moment]
    ) -> None:
        self._sums = sums
        self._loaded = loaded
        self._running = running
        self._moment = moment
        self._queued: deque[Rule] = deque()
        self._loading: dict[Owner, asyncio.Future[None]] = {}  # queued, or being read
        self._corrections: list[UsageEvent] = []  # committed during a read
        self._ended: dict[str, Reservation] = {}  # settled, by request id; a running read may lack their records
        self._recorded: list[str] = []  # those of them that were recorded during a read
        self._task: asyncio.Task[None] | None = None

    async def ensure_loaded(self, rules: Sequence[Rule]) -> None:
        """Return once the owners of `rules` are loaded. Raises the error of a read."""
        missing = [rule for rule in rules if rule.owner not in self._loaded]
        for rule in missing:
            if rule.owner not in self._loading:
                self._loading[rule.owner] = asyncio.get_running_loop().create_future()
                self._queued.append(rule)
        if self._task is None:
            self._task = asyncio.create_task(self._load_queued(), name="allowance loader")
        futures = [self._loading[rule.owner] for rule in missing]
        await asyncio.wait(futures)
        for future in futures:
            future.result()

    def note_correction(self, correction: UsageEvent) -> None:
        """Note a correction that has just been committed: a running read may lack it."""
        if self._task is not None:
            self._corrections.append(correction)

    def note_ended(self, reservation: Reservation) -> None:
        """Note that a request was settled. Call this before it is recorded."""
        if reservation.request_id is not None:
            self._ended[reservation.request_id] = reservation

    def note_recorded(self, request_id: str) -> None:
        """Note that a request was recorded: reads that begin from now on include it."""
        if self._task is None:
            self._ended.pop(request_id, None)
        else:
            self._recorded.append(request_id)

    async def stop(self) -> None:
        """Wait for the running reads to end."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _load_queued(self) -> None:
        try:
            while self._queued:
                await self._load_batch([self._queued.popleft() for _ in range(min(len(self._queued), OWNERS_PER_READ))])
        finally:
            self._task = None
            self._queued.clear()
            for owner in list(self._loading):  # after a cancellation or a bug here: let nobody wait forever
                self._fail(owner, asyncio.CancelledError())
            self._corrections.clear()
            for request_id in self._recorded:
                self._ended.pop(request_id, None)
            self._recorded.clear()

    async def _load_batch(self, rules: Sequence[Rule]) -> None:
        """Load the allowances of these owners, or fail the requests that wait for them. An owner whose load fails does not
        affect the others."""
        try:
            await self._load(rules)
        except Exception as error:  # noqa: BLE001 - owned task: the waiting requests get the error
            if len(rules) == 1:
                self._fail(rules[0].owner, error)
                return
            _log_failure(error, num_owners=len(rules))
            failures = await asyncio.gather(*(self._load([rule]) for rule in rules), return_exceptions=True)
            for rule, failure in zip(rules, failures, strict=True):
                if failure is not None:
                    self._fail(rule.owner, failure)

    async def _load(self, rules: Sequence[Rule]) -> None:
        """Load the allowances of these owners. When it raises, nothing has changed."""
        at = self._moment()
        new = {rule.owner: Allowance(rule.owner, rule.currency, at) for rule in rules}
        sums = await self._sums.read({rule.owner: rule.currency for rule in rules}, at, self._ended.keys)
        # No await from here on: each request is either running or ended. Steps that may fail come first and change only `new`.
        for owner, allowance in new.items():
            allowance.restore(sums[owner], at)
            allowance.enter(self._moment())  # the read may have crossed midnight
        holds = self._holds_of_running(new)
        self._count_ended(new, sums)
        for correction in self._corrections:
            for owner in owners_of(correction.tenant_id, correction.key_id, correction.model):
                if owner in new:
                    new[owner].correct(correction)
        for reservation, hold in holds:
            self._running.add_hold(reservation, hold)
        for owner, allowance in new.items():
            self._loaded[owner] = allowance
            self._loading.pop(owner).set_result(None)

    def _fail(self, owner: Owner, error: BaseException) -> None:
        """Fail the requests that wait for this owner."""
        _log_failure(error, scope=owner.scope, owner_id=owner.id, model=owner.model)
        reported = error if isinstance(error, Exception) else InternalError("reading the usage so far was cancelled")
        future = self._loading.pop(owner)
        future.set_exception(reported)
        future.exception()  # marks it as retrieved: perhaps nobody waits any more

    def _holds_of_running(self, new: Mapping[Owner, Allowance]) -> list[tuple[Reservation, Hold]]:
        """Return what requests admitted before these allowances existed hold in them, on the day of their admission: the ledger
        does not include running requests."""
        return [
            (reservation, allowance.adopt(reservation.need, reservation.holds[0].day.start))
            for reservation in self._running
            for allowance in _allowances_of(reservation, new)
        ]

    def _count_ended(self, new: Mapping[Owner, Allowance], sums: Mapping[Owner, PeriodSums]) -> None:
        """Count the settled requests that were recorded too late for the sums, on the day of their admission."""
        for request_id, reservation in self._ended.items():
            admission_day = reservation.holds[0].day.start
            for allowance in _allowances_of(reservation, new):
                if request_id not in sums[allowance.owner].included:
                    allowance.add_usage(reservation.used, reservation.request.currency, admission_day)


def _log_failure(error: BaseException, **context: object) -> None:
    """Log why a read failed, unless the database is down: perhaps no request is left to report it."""
    if not isinstance(error, OSError) and not (isinstance(error, Exception) and is_outage(error)):
        _log.error("allowance_load_failed", exc_info=error, **context)


def _allowances_of(reservation: Reservation, new: Mapping[Owner, Allowance]) -> list[Allowance]:
    """Return those of `new` that a request counts towards."""
    request = reservation.request
    return [new[owner] for owner in owners_of(request.tenant_id, request.key_id, request.model) if owner in new]
