"""Owners of limits that are new since the start: what they have used is read before any request counts against it.

    asked for ─► in line ─► read, together with all that stood in line ─► known
                             └─ the read failed ─► each of them alone ─┬► known
                                                                       └► whoever waits hears the error; asked for anew

One read runs at a time, or at once one for each of those that failed together. Requests that come meanwhile share the next. So
a start under load takes a few reads instead of one for each key. The read belongs to none of those that wait: one that is
cancelled leaves it to the others.

What ran before its owner was known, or ends while that is read, counts once:

    runs ─► settled, recorded soon ─► recorded, and so in whatever is read from then on
     └ held    └ the read says which of these are in its snapshot: the others are counted here
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
from appliance.metering.limits.running import Running
from appliance.metering.limits.sums import PeriodSums, SumsReader
from appliance.metering.limits.windows import Moment

OWNERS_PER_READ = 64

_log = structlog.get_logger()


class FirstReads:
    """Makes the allowances that are not in `known` yet, and puts them there. Belongs to one event loop."""

    def __init__(self, sums: SumsReader, known: dict[Owner, Allowance], live: Running, moment: Callable[[], Moment]) -> None:
        self._sums = sums
        self._known = known
        self._live = live
        self._moment = moment
        self._line: deque[Rule] = deque()
        self._met: dict[Owner, asyncio.Future[None]] = {}  # of those in line and those that are read
        self._corrections: list[UsageEvent] = []  # corrections while something is read
        self._ended: dict[str, Reservation] = {}  # settled, by request; what is read at the moment may lack their records
        self._recorded: list[str] = []  # of these, since a read began
        self._task: asyncio.Task[None] | None = None

    async def ensure_known(self, rules: Sequence[Rule]) -> None:
        """Return once the owners of `rules` are known. Raises the error of a read."""
        unknown = [rule for rule in rules if rule.owner not in self._known]
        for rule in unknown:
            if rule.owner not in self._met:
                self._met[rule.owner] = asyncio.get_running_loop().create_future()
                self._line.append(rule)
        if self._task is None:
            self._task = asyncio.create_task(self._read_line(), name="first reads")
        waiting = [self._met[rule.owner] for rule in unknown]
        await asyncio.wait(waiting)
        for met in waiting:
            met.result()

    def corrected(self, correction: UsageEvent) -> None:
        """Note a correction that has just been committed: what is read at the moment may lack it."""
        if self._task is not None:
            self._corrections.append(correction)

    def ended(self, reservation: Reservation) -> None:
        """Note that a request has ended, before it is recorded."""
        if reservation.request_id is not None:
            self._ended[reservation.request_id] = reservation

    def recorded(self, request_id: str) -> None:
        """Note that a request is recorded: what is read from now on has it."""
        if self._task is None:
            self._ended.pop(request_id, None)
        else:
            self._recorded.append(request_id)

    async def stop(self) -> None:
        """Return when nothing is read any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _read_line(self) -> None:
        try:
            while self._line:
                await self._read_some([self._line.popleft() for _ in range(min(len(self._line), OWNERS_PER_READ))])
        finally:
            self._task = None
            self._line.clear()
            for owner in list(self._met):  # after a cancellation or a bug in here: nobody waits for ever
                self._fail(owner, asyncio.CancelledError())
            self._corrections.clear()
            for request_id in self._recorded:
                self._ended.pop(request_id, None)
            self._recorded.clear()

    async def _read_some(self, rules: Sequence[Rule]) -> None:
        """Make the allowances of these owners known, or tell who waits for them why not: one that cannot be read, or ends in a
        bug, keeps nobody else out."""
        try:
            await self._read(rules)
        except Exception as error:  # noqa: BLE001 - owned task: whoever waits is told
            if len(rules) == 1:
                self._fail(rules[0].owner, error)
                return
            _log_bug(error, num_owners=len(rules))
            alone = await asyncio.gather(*(self._read([rule]) for rule in rules), return_exceptions=True)
            for rule, failure in zip(rules, alone, strict=True):
                if failure is not None:
                    self._fail(rule.owner, failure)

    async def _read(self, rules: Sequence[Rule]) -> None:
        """Make the allowances of these owners known. Raises what kept it from that; then nothing has changed."""
        at = self._moment()
        made = {rule.owner: Allowance(rule.owner, rule.currency, at) for rule in rules}
        sums = await self._sums.read({rule.owner: rule.currency for rule in rules}, at, self._ended.keys)
        # No await from here on: a request runs or has ended. What may fail comes first, and changes what is made here alone.
        for owner, allowance in made.items():
            allowance.remember(sums[owner], at)
            allowance.enter(self._moment())  # it may have been read over midnight
        holds = self._holds_of_running(made)
        self._count_ended(made, sums)
        for correction in self._corrections:
            for owner in owners_of(correction.tenant_id, correction.key_id, correction.model):
                if owner in made:
                    made[owner].correct(correction)
        for reservation, hold in holds:
            self._live.hold(reservation, hold)
        for owner, allowance in made.items():
            self._known[owner] = allowance
            self._met.pop(owner).set_result(None)

    def _fail(self, owner: Owner, error: BaseException) -> None:
        """End the wait for an owner with the error that kept it from being known."""
        _log_bug(error, scope=owner.scope, owner_id=owner.id, model=owner.model)
        told = error if isinstance(error, Exception) else InternalError("the read of what was used so far was cancelled")
        failed = self._met.pop(owner)
        failed.set_exception(told)
        failed.exception()  # maybe nobody waits any more

    def _holds_of_running(self, made: Mapping[Owner, Allowance]) -> list[tuple[Reservation, Hold]]:
        """Return what those that run already, from before they had these limits, hold of them from now on, on the day of their
        admission: no record has them yet."""
        return [
            (reservation, allowance.join(reservation.need, reservation.holds[0].day.start))
            for reservation in self._live
            for allowance in _counting(reservation, made)
        ]

    def _count_ended(self, made: Mapping[Owner, Allowance], sums: Mapping[Owner, PeriodSums]) -> None:
        """Count what was settled without these limits and was recorded too late for the sums, on the day of its admission."""
        for request_id, reservation in self._ended.items():
            admitted = reservation.holds[0].day.start
            for allowance in _counting(reservation, made):
                if request_id not in sums[allowance.owner].counted:
                    allowance.count(reservation.used, reservation.request.currency, admitted)


def _log_bug(error: BaseException, **of: object) -> None:
    """Log why a read failed, unless it is the database's fault: maybe nobody waits any more."""
    if not isinstance(error, OSError) and not (isinstance(error, Exception) and is_outage(error)):
        _log.error("first_read_failed", exc_info=error, **of)


def _counting(reservation: Reservation, made: Mapping[Owner, Allowance]) -> list[Allowance]:
    """Return those of `made` that a request counts against."""
    request = reservation.request
    return [made[owner] for owner in owners_of(request.tenant_id, request.key_id, request.model) if owner in made]
