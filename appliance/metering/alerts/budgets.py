"""Tells when spending reaches a share of a budget: the month's money, and the day's tokens, of every owner of limits.

An alert is due when what was used stands at or above the threshold, and the outbox tells each webhook the same threshold of
the same owner, limit and period once. So it does not matter in which order events settle, nor how often somebody looks:
`settled` looks in the transaction that settles, be it of the ledger or of a start that settles what a dead run left, and
`sweep` where nothing settles (a lowered budget, a new webhook).

To look means to sum. Between two looks it is carried in memory how much can be used at least until the next threshold: almost
every settlement costs a subtraction for each of its owners that has a budget, and where nobody has one, nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.sql.selectable import CompoundSelect

from appliance.base import counters
from appliance.base.clock import Clock
from appliance.base.db import Database, after_commit
from appliance.metering.alerts import outbox
from appliance.metering.alerts.notices import Notice, notices_of
from appliance.metering.alerts.outbox_history import KEEP_DAYS_MIN
from appliance.metering.alerts.plans import Period, Plan, read_plans
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.ledger.rollups import SETTLED, join_sum
from appliance.metering.limits.owner_sums import days_of_month, spread, sums_query
from appliance.metering.limits.owners import Owner, owners_of

PERIODS_MAX = 64  # of one owner: late events may be of other months and days than today's
SWEEP_INTERVAL_S = 3600.0
TOLD_FOR = timedelta(days=KEEP_DAYS_MIN - 1)
"""Of a day or a month that began longer ago nothing is told: what was told before may be forgotten."""
SWEPT_AT_ONCE = 50  # notices in one transaction of a sweep: a settlement waits for no more


@dataclass(slots=True)
class Watch:
    """A plan, and how much can be used at least of each period until the next alert is due; None when none is left.

    `looks` has the last look at each period of which nothing is remembered yet.
    """

    plan: Plan
    left: dict[Period, int | None] = field(default_factory=dict)
    looks: dict[Period, object] = field(default_factory=dict)

    def count(self, event: UsageEvent, since: date) -> Iterator[Period]:
        """Count the event, and yield the periods that must be looked at, of those that begin on `since` or later.

        A correction that takes away counts as nothing, and what is rolled back stays counted: more is left than is thought.
        What counts as nothing reaches no threshold.
        """
        tokens, day = event.prompt_tokens + event.completion_tokens, event.billing_day
        for kind in self.plan.limits:
            period = Period(kind, day.replace(day=1) if kind == "budget" else day)
            used, left = self.plan.counted(kind, tokens, event.cost_picos, event.currency), self.left.get(period, 0)
            if used <= 0 or left is None or period.start < since:
                continue
            left -= used
            if left > 0:
                self.left[period] = left
                continue
            # Until the alert is durable nothing is remembered: if this is rolled back, the next one looks again.
            self.left.pop(period, None)
            self.looks[period] = object()
            yield period

    def remember(self, period: Period, used: int, look: object, _db: Database | None = None) -> None:
        """Take what was found by a look that is durable now, if it was the last one.

        On PostgreSQL a transaction may hear of its COMMIT when the next one has looked already, or has remembered even: what
        that one counted is in no sum of the first.
        """
        if self.looks.get(period) is not look:
            return
        del self.looks[period]
        if len(self.left) >= PERIODS_MAX:
            self.left.clear()
        next_at = self.plan.next_at(period.kind, used)
        self.left[period] = None if next_at is None else next_at - used


class _Watches:
    """Everybody who has a plan, as of one count of changes, and who of them watches the use of a model by a key."""

    def __init__(self, as_of: int, watches: dict[Owner, Watch]) -> None:
        self.as_of = as_of
        self.by_owner = watches
        self._by_use: dict[tuple[str, str], tuple[Watch, ...]] = {}

    def over(self, event: UsageEvent) -> tuple[Watch, ...]:
        """Return those whose limits the event counts against."""
        use = event.key_id, event.model
        found = self._by_use.get(use)
        if found is None:
            owners = owners_of(event.tenant_id, event.key_id, event.model)
            found = self._by_use[use] = tuple(self.by_owner[owner] for owner in owners if owner in self.by_owner)
        return found


class BudgetAlerts:
    """Watches all budgets. `settled` is called by whoever settles, in its transaction."""

    def __init__(self, db: Database, clock: Clock, calendar: BillingCalendar, *, currency: str) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._currency = currency
        self._watches = _Watches(-1, {})
        self._swept_of = (-1, -1)
        self._swept_s = 0.0
        self._told: set[tuple[str, str]] = set()
        self._told_of: tuple[int, date] | None = None

    def settled(self, connection: Connection, events: Sequence[UsageEvent]) -> None:
        """Tell of the thresholds that these events reach. Call it behind the sums: they have the events already."""
        watches = self._watches_now(connection)
        if not watches.by_owner:
            return
        since = self._calendar.day_of(self._clock.now()) - TOLD_FOR
        due: defaultdict[Period, dict[Owner, Watch]] = defaultdict(dict)
        for event in events:
            if event.status in SETTLED:
                for watch in watches.over(event):
                    for period in watch.count(event, since):
                        due[period][watch.plan.owner] = watch
        for period, reached in due.items():
            self._look(connection, period, reached)

    def _watches_now(self, connection: Connection) -> _Watches:
        """Return all watches. They are read again when any tenant, key or model has changed.

        What is left is kept where the plan is as it was. Who had none in between starts anew: what he used then is not known.
        """
        changes = self._db.principals.value
        if self._watches.as_of != changes:
            before = self._watches.by_owner
            plans = read_plans(connection, self._clock.now(), self._currency)
            same = {owner: before[owner] for owner, plan in plans.items() if owner in before and before[owner].plan == plan}
            self._watches = _Watches(changes, {owner: same.get(owner) or Watch(plan) for owner, plan in plans.items()})
        return self._watches

    def _look(self, connection: Connection, period: Period, watches: dict[Owner, Watch]) -> None:
        used = _used_by(connection, self._calendar, period, {owner: watch.plan for owner, watch in watches.items()})
        for owner, watch in watches.items():
            self._tell(connection, notices_of(watch.plan, period, used[owner]))
            after_commit(connection, partial(watch.remember, period, used[owner], watch.looks[period]))

    async def sweep(self) -> None:
        """Tell of every threshold that stands reached now, if owners or webhooks have changed since the last time.

        Also once in SWEEP_INTERVAL_S. What changes while it looks is looked at the next time.
        """
        of = (self._db.principals.value, self._db.webhooks.value)
        now_s = self._clock.monotonic_s()
        if of == self._swept_of and now_s - self._swept_s < SWEEP_INTERVAL_S:
            return
        today = self._calendar.day_of(self._clock.now())
        async with self._db.reading() as connection:
            standing = await connection.run_sync(self._standing, today)
        if self._told_of != (told_of := (of[1], today)):
            self._told.clear()
            self._told_of = told_of
        new = [notice for notice in standing if (notice.event, notice.subject) not in self._told]
        for first in range(0, len(new), SWEPT_AT_ONCE):
            some = new[first : first + SWEPT_AT_ONCE]
            async with self._db.writing() as connection:
                # As whoever settles does: two that tell the same in another order would wait for each other on PostgreSQL.
                await counters.locked(connection, counters.POSTING)
                await connection.run_sync(self._tell, some)
            self._told |= {(notice.event, notice.subject) for notice in some}
        self._swept_of, self._swept_s = of, now_s

    def _standing(self, connection: Connection, today: date) -> list[Notice]:
        """Return every notice that today and this month stand for."""
        plans = read_plans(connection, self._clock.now(), self._currency)
        standing: list[Notice] = []
        for period in (Period("budget", today.replace(day=1)), Period("tokens_per_day", today)):
            limited = {owner: plan for owner, plan in plans.items() if period.kind in plan.limits}
            used = _used_by(connection, self._calendar, period, limited) if limited else {}
            for owner, spent in used.items():
                standing += notices_of(limited[owner], period, spent)
        return standing

    def _tell(self, connection: Connection, notices: Sequence[Notice]) -> None:
        for notice in notices:
            outbox.tell_at_once(
                connection,
                self._clock.now(),
                event=notice.event,
                subject=notice.subject,
                data=notice.data,
                tenant_id=notice.tenant_id,
            )


def _used_by(connection: Connection, calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> Counter[Owner]:
    """Return what each owner of `plans` has used in `period` that counts, in one statement."""
    used: Counter[Owner] = Counter()
    rows = connection.execute(used_query(calendar, period, plans)) if plans else ()
    for owner, row in spread(rows, plans):
        cost_picos = join_sum(row.high, row.low)
        used[owner] += plans[owner].counted(period.kind, int(row.tokens), cost_picos, row.currency)
    return used


def used_query(calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> CompoundSelect[Any]:
    """Return the query for the sums of the owners of `plans`, who are some."""
    is_month = period.kind == "budget"
    return sums_query(plans, days_of_month(calendar, period.start) if is_month else [calendar.day_start(period.start)])
