"""Threshold alerts: usage of a tenant, key or model reaches a percentage of its monthly budget or tokens per day.

An alert is due while usage is at or above the threshold, and the outbox sends each webhook only one alert per threshold, owner,
limit and period. So neither the order in which events settle nor the number of checks matters. `on_settled` checks in the
settling transaction (of the ledger, or of the recovery at a start); `sweep` checks when nothing settles (after a lowered
budget, for a new webhook).

A check sums usage in the database. Between checks a counter in memory holds a lower bound of the usage left until the next
threshold, so most settlements cost one subtraction per owner with a budget, and nothing for owners without.
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
from appliance.metering.alerts.outbox_pruning import KEEP_DAYS_MIN
from appliance.metering.alerts.rules import AlertRule, Period, read_alert_rules
from appliance.metering.alerts.threshold_alerts import ThresholdAlert, reached_alerts
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import BILLED, UsageEvent
from appliance.metering.ledger.rollups import join_sum
from appliance.metering.limits.owner_sums import days_of_month, rows_by_owner, sums_query
from appliance.metering.limits.owners import Owner, owners_of

PERIODS_MAX = 64  # per owner: late events may belong to earlier months and days
SWEEP_INTERVAL_S = 3600.0
ALERT_WINDOW = timedelta(days=KEEP_DAYS_MIN - 1)
"""Periods that began earlier raise no alerts: the outbox may have pruned the alerts already sent about them."""
ALERTS_PER_TRANSACTION = 50  # in a sweep; its transactions block settlements


@dataclass(slots=True)
class ThresholdTracker:
    """Tracks usage against one rule. `headroom`: by period, a lower bound of the usage left until the next threshold, None if
    all thresholds are reached; a missing period must be checked.

    `pending_checks` identifies the latest check of each period whose result is not durable yet.
    """

    rule: AlertRule
    headroom: dict[Period, int | None] = field(default_factory=dict)
    pending_checks: dict[Period, object] = field(default_factory=dict)

    def add_usage(self, event: UsageEvent, since: date) -> Iterator[Period]:
        """Subtract the event from the headroom, and yield the periods, from those beginning on or after `since`, to check now.

        Negative corrections and events that are rolled back are not added back: `headroom` is a lower bound. An event whose
        usage is zero or negative cannot reach a threshold.
        """
        tokens, day = event.prompt_tokens + event.completion_tokens, event.billing_day
        for kind in self.rule.limits:
            period = Period(kind, day.replace(day=1) if kind == "budget" else day)
            used = self.rule.counted_usage(kind, tokens, event.cost_picos, event.currency)
            headroom = self.headroom.get(period, 0)
            if used <= 0 or headroom is None or period.start < since:
                continue
            headroom -= used
            if headroom > 0:
                self.headroom[period] = headroom
                continue
            # No headroom is stored until the alert is durable: after a rollback the next event checks again.
            self.headroom.pop(period, None)
            self.pending_checks[period] = object()
            yield period

    def store_check(self, period: Period, used: int, check: object, _db: Database | None = None) -> None:
        """Store the headroom found by `check`, whose transaction has committed, unless a later check has begun.

        On PostgreSQL the next transaction may check, and even store its result, before this one learns of its own COMMIT; the
        usage added by the next one is missing from the sums of this one.
        """
        if self.pending_checks.get(period) is not check:
            return
        del self.pending_checks[period]
        if len(self.headroom) >= PERIODS_MAX:
            self.headroom.clear()
        next_threshold = self.rule.next_threshold(period.kind, used)
        self.headroom[period] = None if next_threshold is None else next_threshold - used


class _Trackers:
    """The trackers of all owners with a rule, as read at version `as_of` of tenants, keys and models."""

    def __init__(self, as_of: int, trackers: dict[Owner, ThresholdTracker]) -> None:
        self.as_of = as_of
        self.by_owner = trackers
        self._by_key_and_model: dict[tuple[str, str], tuple[ThresholdTracker, ...]] = {}

    def for_event(self, event: UsageEvent) -> tuple[ThresholdTracker, ...]:
        """Return the trackers of the owners whose limits the event counts against."""
        key_and_model = event.key_id, event.model
        found = self._by_key_and_model.get(key_and_model)
        if found is None:
            owners = owners_of(event.tenant_id, event.key_id, event.model)
            found = tuple(self.by_owner[owner] for owner in owners if owner in self.by_owner)
            self._by_key_and_model[key_and_model] = found
        return found


class BudgetAlerts:
    """Raises threshold alerts for all owners. Every settlement calls `on_settled` in its transaction."""

    def __init__(self, db: Database, clock: Clock, calendar: BillingCalendar, *, currency: str) -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._currency = currency
        self._trackers = _Trackers(-1, {})
        self._swept_versions = (-1, -1)
        self._swept_s = 0.0
        self._enqueued: set[tuple[str, str]] = set()
        self._enqueued_as_of: tuple[int, date] | None = None

    def on_settled(self, connection: Connection, events: Sequence[UsageEvent]) -> None:
        """Enqueue an alert for each threshold that these events reach. Call it after adding the events to the rollups."""
        trackers = self._current_trackers(connection)
        if not trackers.by_owner:
            return
        since = self._calendar.day_of(self._clock.now()) - ALERT_WINDOW
        due: defaultdict[Period, dict[Owner, ThresholdTracker]] = defaultdict(dict)
        for event in events:
            if event.status in BILLED:
                for tracker in trackers.for_event(event):
                    for period in tracker.add_usage(event, since):
                        due[period][tracker.rule.owner] = tracker
        for period, trackers_due in due.items():
            self._check(connection, period, trackers_due)

    def _current_trackers(self, connection: Connection) -> _Trackers:
        """Return all trackers, reading the rules again if any tenant, key or model has changed.

        A tracker is kept while its rule is unchanged. An owner that had no rule for a time gets a new one: its usage meanwhile
        was not tracked.
        """
        version = self._db.principal_changes.value
        if self._trackers.as_of != version:
            before = self._trackers.by_owner
            rules = read_alert_rules(connection, self._clock.now(), self._currency)
            kept = {owner: before[owner] for owner, rule in rules.items() if owner in before and before[owner].rule == rule}
            trackers = {owner: kept.get(owner) or ThresholdTracker(rule) for owner, rule in rules.items()}
            self._trackers = _Trackers(version, trackers)
        return self._trackers

    def _check(self, connection: Connection, period: Period, trackers: dict[Owner, ThresholdTracker]) -> None:
        rules = {owner: tracker.rule for owner, tracker in trackers.items()}
        used = _usage_by_owner(connection, self._calendar, period, rules)
        reached = [alert for owner, rule in rules.items() for alert in reached_alerts(rule, period, used[owner])]
        if reached:
            self._enqueue(connection, reached)
        for owner, tracker in trackers.items():
            after_commit(connection, partial(tracker.store_check, period, used[owner], tracker.pending_checks[period]))

    async def sweep(self) -> None:
        """Enqueue an alert for every threshold that is reached now, if owners or webhooks have changed since the last sweep or
        SWEEP_INTERVAL_S have passed. A change during a sweep is seen by the next one."""
        versions = (self._db.principal_changes.value, self._db.webhook_changes.value)
        now_s = self._clock.monotonic_s()
        if versions == self._swept_versions and now_s - self._swept_s < SWEEP_INTERVAL_S:
            return
        today = self._calendar.day_of(self._clock.now())
        async with self._db.reading() as connection:
            due = await connection.run_sync(self._due_alerts, today)
        as_of = versions[1], today
        if as_of != self._enqueued_as_of:
            self._enqueued_as_of, self._enqueued = as_of, set()
        new = [alert for alert in due if (alert.event, alert.subject) not in self._enqueued]
        for batch in batched(new, ALERTS_PER_TRANSACTION):
            async with self._db.writing() as connection:
                # Lock like a settlement: two transactions writing the same messages in different order deadlock on PostgreSQL.
                await counters.lock(connection, counters.POSTING)
                await connection.run_sync(self._enqueue, batch)
            self._enqueued |= {(alert.event, alert.subject) for alert in batch}
        self._swept_versions, self._swept_s = versions, now_s

    def _due_alerts(self, connection: Connection, today: date) -> list[ThresholdAlert]:
        """Return the alerts due for the current day and month."""
        rules = read_alert_rules(connection, self._clock.now(), self._currency)
        due: list[ThresholdAlert] = []
        for period in (Period("budget", today.replace(day=1)), Period("tokens_per_day", today)):
            limited = {owner: rule for owner, rule in rules.items() if period.kind in rule.limits}
            for owner, used in _usage_by_owner(connection, self._calendar, period, limited).items():
                due += reached_alerts(limited[owner], period, used)
        return due

    def _enqueue(self, connection: Connection, alerts: Sequence[ThresholdAlert]) -> None:
        messages = [outbox.Message(alert.event, alert.subject, alert.data, alert.tenant_id) for alert in alerts]
        outbox.enqueue(connection, self._clock.now(), messages)


def _usage_by_owner(
    connection: Connection, calendar: BillingCalendar, period: Period, rules: Mapping[Owner, AlertRule]
) -> Counter[Owner]:
    """Return the usage in `period` that counts against each owner's limit, by one query."""
    used: Counter[Owner] = Counter()
    rows = connection.execute(usage_query(calendar, period, rules)) if rules else ()
    for owner, row in rows_by_owner(rows, rules):
        cost_picos = join_sum(row.high, row.low)
        used[owner] += rules[owner].counted_usage(period.kind, int(row.tokens), cost_picos, row.currency)
    return used


def usage_query(calendar: BillingCalendar, period: Period, rules: Mapping[Owner, AlertRule]) -> CompoundSelect[Any]:
    """Return the query for the usage sums of the owners of `rules`, which must not be empty."""
    is_month = period.kind == "budget"
    return sums_query(rules, days_of_month(calendar, period.start) if is_month else [calendar.day_start(period.start)])
