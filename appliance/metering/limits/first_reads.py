"""Owners of limits that nobody has asked for since the start: what they have used is read before anybody counts against it.

    asked for ─► in line ─► read, together with all that stood in line ─► known
                             └─ the read failed ─► each of them alone ─┬► known
                                                                       └► whoever waits hears the error; asked for anew

One read is under way at a time; who comes meanwhile is in the next. So a start under load takes a few reads, not one after the
other for each key. Nobody who waits is needed for the read: whoever is cancelled leaves it to the others.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from appliance.metering.ledger.records import UsageEvent
from appliance.metering.limits.allowances import Allowance
from appliance.metering.limits.quotas import Moment, Owner, owners_of
from appliance.metering.limits.remaining import Running
from appliance.metering.limits.rules import Rule
from appliance.metering.limits.sums import SumsReader

OWNERS_AT_ONCE = 64


class FirstReads:
    """Makes the allowances that are not in `known` yet, and puts them there. Belongs to one event loop."""

    def __init__(self, sums: SumsReader, known: dict[Owner, Allowance], live: Running, moment: Callable[[], Moment]) -> None:
        self._sums = sums
        self._known = known
        self._live = live
        self._moment = moment
        self._line: deque[Rule] = deque()
        self._met: dict[Owner, asyncio.Future[None]] = {}  # of those in line and those that are read
        self._heard: list[UsageEvent] = []  # corrections while something is read
        self._task: asyncio.Task[None] | None = None

    async def meet(self, rules: Sequence[Rule]) -> None:
        """Return once the owners of `rules` are known. Raises the error of a read."""
        strangers = [rule for rule in rules if rule.owner not in self._known]
        for rule in strangers:
            if rule.owner not in self._met:
                self._met[rule.owner] = asyncio.get_running_loop().create_future()
                self._line.append(rule)
        if self._task is None:
            self._task = asyncio.create_task(self._read_line(), name="first reads")
        waiting = [self._met[rule.owner] for rule in strangers]
        await asyncio.wait(waiting)
        for met in waiting:
            met.result()

    def hear(self, correction: UsageEvent) -> None:
        """Hear of a correction that has just been committed: what is read at the moment may lack it."""
        if self._task is not None:
            self._heard.append(correction)

    async def stop(self) -> None:
        """Return when nothing is read any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _read_line(self) -> None:
        while self._line:
            await self._read([self._line.popleft() for _ in range(min(len(self._line), OWNERS_AT_ONCE))])
        self._heard.clear()
        self._task = None

    async def _read(self, rules: Sequence[Rule]) -> None:
        """Make the allowances of these owners known, or tell who waits for them why not."""
        at = self._moment()
        made = {rule.owner: Allowance(rule.owner, rule.currency, at) for rule in rules}
        self._hold_what_runs(made, at)
        try:
            sums = await self._sums.read({rule.owner: rule.currency for rule in rules}, at)
            for owner, allowance in made.items():
                allowance.remember(sums[owner], at)
        except Exception as error:  # noqa: BLE001 - owned task: whoever waits is told
            self._live.let_go(made.values())
            if len(rules) > 1:  # one that cannot be read keeps nobody else out
                await asyncio.gather(*(self._read([rule]) for rule in rules))
                return
            failed = self._met.pop(rules[0].owner)
            failed.set_exception(error)
            failed.exception()  # maybe nobody waits any more
            return
        self._hold_what_runs(made, self._moment())  # others began meanwhile
        for correction in self._heard:
            for owner in owners_of(correction.tenant_id, correction.key_id, correction.model):
                if owner in made:
                    made[owner].correct(correction)
        for owner, allowance in made.items():
            self._known[owner] = allowance
            self._met.pop(owner).set_result(None)

    def _hold_what_runs(self, made: dict[Owner, Allowance], at: Moment) -> None:
        """Let what runs already, from before it had these limits, count with them from now on."""
        for reservation in self._live:
            work = reservation.work
            for owner in owners_of(work.tenant_id, work.key_id, work.model):
                allowance = made.get(owner)
                if allowance is not None and not self._live.holds(reservation, allowance):
                    self._live.hold(reservation, allowance.take(reservation.need, at, buckets=False))
