"""Alerts when usage reaches a share of a budget: the month's money, and the day's tokens, of every owner of limits.

An alert is due when the usage is at or above the threshold, and the outbox sends each webhook only one alert per threshold,
owner, limit and period. So neither the order in which events settle nor the number of checks matters: `settled` checks in the
transaction that settles (of the ledger, or of a start that settles what a dead run left), and `sweep` checks where nothing
settles (a lowered budget, a new webhook).

A check has to sum usage. Between two checks a counter in memory holds how much can be used, at least, before the next
threshold: so almost every settlement costs one subtraction per owner with a budget, and nothing where there is no budget.
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
from appliance.base.batches import batched
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

PERIODS_MAX = 64  # of one owner: late events may belong to other months and days than today's
SWEEP_INTERVAL_S = 3600.0
ALERTED_FOR = timedelta(days=KEEP_DAYS_MIN - 1)
"""Days and months that began longer ago alert nobody: the outbox may have forgotten what it sent about them."""
NOTICES_PER_TRANSACTION = 50  # notices in one transaction of a sweep, for which settlements wait


@dataclass(slots=True)
class Watch:
    """A plan, and for each period how much can be used, at least, before the next alert is due; None when none is left.

    `looks` has the latest check of each period whose result is not yet durable.
    """

    plan: Plan
    left: dict[Period, int | None] = field(default_factory=dict)
    looks: dict[Period, object] = field(default_factory=dict)

    def count(self, event: UsageEvent, since: date) -> Iterator[Period]:
        """Count the event, and yield the periods that must be checked, of those that begin on `since` or later.

        Negative corrections are not counted, and events that are rolled back stay counted: `left` is a lower bound. An event
        that counts as zero or less reaches no threshold.
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
            # Nothing is remembered until the alert is durable: if it is rolled back, the next event checks again.
            self.left.pop(period, None)
            self.looks[period] = object()
            yield period

    def remember(self, period: Period, used: int, look: object, _db: Database | None = None) -> None:
        """Store the result of the check `look`, which is durable now, if it was the latest one.

        On PostgreSQL a transaction may learn of its COMMIT after the next one has already checked, or even stored its result:
        what that one counted is missing from the sums of the first.
        """
        if self.looks.get(period) is not look:
            return
        del self.looks[period]
        if len(self.left) >= PERIODS_MAX:
            self.left.clear()
        next_at = self.plan.next_at(period.kind, used)
        self.left[period] = None if next_at is None else next_at - used


class _Watches:
    """A watch for every owner with a plan, as of one count of changes, and those that apply to the use of a model by a key."""

    def __init__(self, as_of: int, watches: dict[Owner, Watch]) -> None:
        self.as_of = as_of
        self.by_owner = watches
        self._by_use: dict[tuple[str, str], tuple[Watch, ...]] = {}

    def for_event(self, event: UsageEvent) -> tuple[Watch, ...]:
        """Return the watches of the owners whose limits the event counts against."""
        use = event.key_id, event.model
        found = self._by_use.get(use)
        if found is None:
            owners = owners_of(event.tenant_id, event.key_id, event.model)
            found = self._by_use[use] = tuple(self.by_owner[owner] for owner in owners if owner in self.by_owner)
        return found


class BudgetAlerts:
    """Watches all budgets. Every settlement calls `settled` in its transaction."""

    def __init__(self, db: Database, clock: Clock, calendar: BillingCalendar, *, currency: str) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._currency = currency
        self._watches = _Watches(-1, {})
        self._swept_of = (-1, -1)
        self._swept_s = 0.0
        self._enqueued: set[tuple[str, str]] = set()
        self._enqueued_as_of: tuple[int, date] | None = None

    def settled(self, connection: Connection, events: Sequence[UsageEvent]) -> None:
        """Send an alert for each threshold that these events reach. Call it after the events were added to the sums."""
        watches = self._watches_now(connection)
        if not watches.by_owner:
            return
        since = self._calendar.day_of(self._clock.now()) - ALERTED_FOR
        due: defaultdict[Period, dict[Owner, Watch]] = defaultdict(dict)
        for event in events:
            if event.status in SETTLED:
                for watch in watches.for_event(event):
                    for period in watch.count(event, since):
                        due[period][watch.plan.owner] = watch
        for period, reached in due.items():
            self._look(connection, period, reached)

    def _watches_now(self, connection: Connection) -> _Watches:
        """Return all watches. They are read again when any tenant, key or model has changed.

        A watch whose plan is unchanged is kept. An owner without a plan in between starts anew: its usage meanwhile was not
        counted.
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
            self._enqueue(connection, notices_of(watch.plan, period, used[owner]))
            after_commit(connection, partial(watch.remember, period, used[owner], watch.looks[period]))

    async def sweep(self) -> None:
        """Send an alert for every threshold that is reached now, if owners or webhooks have changed since the last sweep.

        Also once every SWEEP_INTERVAL_S. A change during a sweep is seen by the next one.
        """
        of = (self._db.principals.value, self._db.webhooks.value)
        now_s = self._clock.monotonic_s()
        if of == self._swept_of and now_s - self._swept_s < SWEEP_INTERVAL_S:
            return
        today = self._calendar.day_of(self._clock.now())
        async with self._db.reading() as connection:
            due = await connection.run_sync(self._due_notices, today)
        as_of = of[1], today
        if as_of != self._enqueued_as_of:
            self._enqueued_as_of, self._enqueued = as_of, set()
        new = [notice for notice in due if (notice.event, notice.subject) not in self._enqueued]
        for some in batched(new, NOTICES_PER_TRANSACTION):
            async with self._db.writing() as connection:
                # Lock as a settlement does: two that write the same messages in another order would deadlock on PostgreSQL.
                await counters.lock(connection, counters.POSTING)
                await connection.run_sync(self._enqueue, some)
            self._enqueued |= {(notice.event, notice.subject) for notice in some}
        self._swept_of, self._swept_s = of, now_s

    def _due_notices(self, connection: Connection, today: date) -> list[Notice]:
        """Return every notice that is due by the usage of today and this month."""
        plans = read_plans(connection, self._clock.now(), self._currency)
        due: list[Notice] = []
        for period in (Period("budget", today.replace(day=1)), Period("tokens_per_day", today)):
            limited = {owner: plan for owner, plan in plans.items() if period.kind in plan.limits}
            for owner, spent in _used_by(connection, self._calendar, period, limited).items():
                due += notices_of(limited[owner], period, spent)
        return due

    def _enqueue(self, connection: Connection, notices: Sequence[Notice]) -> None:
        for notice in notices:
            outbox.enqueue(
                connection,
                self._clock.now(),
                event=notice.event,
                subject=notice.subject,
                data=notice.data,
                tenant_id=notice.tenant_id,
            )


def _used_by(connection: Connection, calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> Counter[Owner]:
    """Return how much each owner of `plans` has used in `period` that counts against its limit, by one query."""
    used: Counter[Owner] = Counter()
    rows = connection.execute(used_query(calendar, period, plans)) if plans else ()
    for owner, row in spread(rows, plans):
        cost_picos = join_sum(row.high, row.low)
        used[owner] += plans[owner].counted(period.kind, int(row.tokens), cost_picos, row.currency)
    return used


def used_query(calendar: BillingCalendar, period: Period, plans: Mapping[Owner, Plan]) -> CompoundSelect[Any]:
    """Return the query for the sums of the owners of `plans`, which must not be empty."""
    is_month = period.kind == "budget"
    return sums_query(plans, days_of_month(calendar, period.start) if is_month else [calendar.day_start(period.start)])
