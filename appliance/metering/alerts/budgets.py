"""Tells when a tenant's spending reaches a share of its budget: the month's money, and the day's tokens.

An alert is due when what was used stands at or above the threshold, and the outbox tells each webhook the same threshold of
the same budget and period once. So it does not matter in which order events settle, nor how often somebody looks: `settled`
looks in the transaction that settles, be it of the ledger or of a start that settles what a dead run left, and `sweep` where
nothing settles (a lowered budget, a new webhook).

To look means to sum. Between two looks an upper bound of what was used is carried in memory, and compared with the next
threshold: almost every settlement costs an addition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from functools import partial
from typing import Literal

from sqlalchemy import Connection, RowMapping, func, select

from appliance.base.clock import Clock
from appliance.base.db import Database, after_commit
from appliance.base.money import PICOS_PER_MICRO
from appliance.base.tables import tenants, usage_rollups
from appliance.metering.alerts import outbox
from appliance.metering.calendar import BillingCalendar
from appliance.metering.ledger.records import UsageEvent
from appliance.metering.ledger.rollups import DAY, SETTLED, SPLIT

PERCENTS_DEFAULT = (80, 100)
PERIODS_MAX = 64  # of one tenant: late events may be of other months and days than today's
SWEEP_INTERVAL_S = 3600.0

Kind = Literal["budget", "tokens_per_day"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a tenant is alerted of: limits (picos a month, tokens a day) and the shares of them that alert, rising."""

    tenant_id: str
    tenant_name: str
    currency: str
    limits: dict[Kind, int]
    percents: tuple[int, ...]

    def reached(self, kind: Kind, used: int) -> list[int]:
        """Return the percentages that `used` stands at or above."""
        return [percent for percent in self.percents if used * 100 >= percent * self.limits[kind]]

    def next_at(self, kind: Kind, used: int) -> int | None:
        """Return the use from which the next threshold is reached, None when all are."""
        left = [percent for percent in self.percents if used * 100 < percent * self.limits[kind]]
        return -(-left[0] * self.limits[kind] // 100) if left else None


@dataclass(frozen=True, slots=True)
class Period:
    """What is counted together: money of the month, or tokens of the day, that `start` begins. One tenant's."""

    tenant_id: str
    kind: Kind
    start: date


@dataclass(slots=True)
class Meter:
    """At least what was used in a period, and the use at which the next alert is due."""

    used: int
    next_at: int | None


@dataclass(slots=True)
class Used:
    """What one tenant used in a period."""

    tokens: int = 0
    picos: Counter[str] = field(default_factory=Counter)
    """By currency: a tenant may have been billed in another one before."""

    def of(self, plan: Plan, kind: Kind) -> int:
        """Return what counts against the limit of this kind."""
        return self.picos[plan.currency] if kind == "budget" else self.tokens


class BudgetAlerts:
    """Watches all tenants. `settled` is called by whoever settles, in its transaction."""

    def __init__(self, db: Database, clock: Clock, calendar: BillingCalendar, *, currency: str = "EUR") -> None:
        self._db = db
        self._clock = clock
        self._calendar = calendar
        self._currency = currency
        self._plans: dict[str, Plan | None] = {}
        self._read: set[str] = set()
        self._meters: dict[str, dict[Period, Meter]] = {}
        self._plans_of = -1
        self._swept_of = (-1, -1)
        self._swept_s = 0.0

    def settled(self, connection: Connection, events: Sequence[UsageEvent]) -> None:
        """Tell of the thresholds that these events reach. Call it behind the sums: they have the events already."""
        plans = self._plans_for(connection, {event.tenant_id for event in events})
        added: Counter[Period] = Counter()
        for event in events:
            plan = plans[event.tenant_id]
            if plan is not None and event.status in SETTLED:
                added.update(self._amounts(plan, event))
        for period, amount in added.items():
            plan = plans[period.tenant_id]
            assert plan is not None
            self._add(connection, plan, period, amount)

    def _amounts(self, plan: Plan, event: UsageEvent) -> dict[Period, int]:
        """Return what the event adds. A correction that takes away adds nothing: the bound stays a bound."""
        day = event.billing_day
        amounts: dict[Period, int] = {}
        if "budget" in plan.limits and event.currency == plan.currency:
            amounts[Period(plan.tenant_id, "budget", day.replace(day=1))] = max(event.cost_picos, 0)
        if "tokens_per_day" in plan.limits:
            amounts[Period(plan.tenant_id, "tokens_per_day", day)] = max(event.prompt_tokens + event.completion_tokens, 0)
        return amounts

    def _add(self, connection: Connection, plan: Plan, period: Period, amount: int) -> None:
        meters = self._meters.get(plan.tenant_id, {})
        if period in meters:
            meter = meters[period]
            meter.used += amount
            if meter.next_at is None or meter.used < meter.next_at:
                return
            # Until the alert is durable nothing is remembered: if this is rolled back, the next one looks again.
            del meters[period]
        sums = self._sums(connection, period.kind, period.start, plan.tenant_id)
        used = sums.get(plan.tenant_id, Used()).of(plan, period.kind)
        self._tell(connection, plan, period, used)
        after_commit(connection, partial(self._remember, plan, period, Meter(used, plan.next_at(period.kind, used))))

    def _remember(self, plan: Plan, period: Period, meter: Meter, _db: Database) -> None:
        if self._plans.get(plan.tenant_id) != plan:
            return  # the tenant has changed since
        meters = self._meters.setdefault(plan.tenant_id, {})
        if len(meters) >= PERIODS_MAX:
            meters.clear()
        meters[period] = meter

    def _tell(self, connection: Connection, plan: Plan, period: Period, used: int) -> None:
        limit = plan.limits[period.kind]
        for percent in plan.reached(period.kind, used):
            outbox.tell_at_once(
                connection,
                self._clock.now(),
                event="budget.threshold" if period.kind == "budget" else "tokens_per_day.threshold",
                subject=f"{plan.tenant_id}:{period.start.isoformat()}:{percent}:{limit}",
                data=_data(plan, period, percent, used),
                tenant_id=plan.tenant_id,
            )

    async def sweep(self) -> None:
        """Tell of every threshold that stands reached now, if tenants or webhooks have changed since the last time.

        Also once in SWEEP_INTERVAL_S. What changes while it looks is looked at the next time.
        """
        of = (self._db.principals.value, self._db.webhooks.value)
        now_s = self._clock.monotonic_s()
        if of == self._swept_of and now_s - self._swept_s < SWEEP_INTERVAL_S:
            return
        today = self._calendar.day_of(self._clock.now())
        async with self._db.reading() as connection:
            plans = await connection.run_sync(self._read_plans, None)
            starts: dict[Kind, date] = {"budget": today.replace(day=1), "tokens_per_day": today}
            wanted = [kind for kind in starts if any(kind in plan.limits for plan in plans)]
            sums = {kind: await connection.run_sync(self._sums, kind, starts[kind]) for kind in wanted}
        due = [
            (plan, Period(plan.tenant_id, kind, starts[kind]), used)
            for plan in plans
            for kind in plan.limits
            if plan.reached(kind, used := sums[kind].get(plan.tenant_id, Used()).of(plan, kind))
        ]
        if due:
            async with self._db.writing() as connection:
                for plan, period, used in due:
                    await connection.run_sync(self._tell, plan, period, used)
        self._swept_of, self._swept_s = of, now_s

    def _plans_for(self, connection: Connection, tenant_ids: set[str]) -> dict[str, Plan | None]:
        """Return the plan of each tenant, None for one without a budget.

        They are read again when any tenant or key has changed; what was counted is kept where the plan is as it was.
        """
        if self._plans_of != self._db.principals.value:
            self._plans_of = self._db.principals.value
            self._read.clear()
        missing = tenant_ids - self._read
        if missing:
            found = {plan.tenant_id: plan for plan in self._read_plans(connection, missing)}
            for tenant_id in missing:
                plan = found.get(tenant_id)
                if self._plans.get(tenant_id) != plan:
                    self._meters.pop(tenant_id, None)
                self._plans[tenant_id] = plan
            self._read |= missing
        return self._plans

    def _read_plans(self, connection: Connection, tenant_ids: set[str] | None) -> list[Plan]:
        columns = tenants.c
        query = select(
            columns.id,
            columns.name,
            columns.currency,
            columns.monthly_budget_micros,
            columns.tokens_per_day,
            columns.alert_percents,
        )
        if tenant_ids is None:
            limited = columns.monthly_budget_micros.is_not(None) | columns.tokens_per_day.is_not(None)
            query = query.where(limited, columns.archived_at.is_(None))
        else:
            query = query.where(columns.id.in_(sorted(tenant_ids)))
        rows = connection.execute(query).mappings().all()
        return [plan for row in rows if (plan := _plan(row, self._currency)) is not None]

    def _sums(self, connection: Connection, kind: Kind, start: date, tenant_id: str | None = None) -> dict[str, Used]:
        """Return what was used in the period from `start` on, by tenant."""
        begin, end = self._bounds(kind, start)
        columns = usage_rollups.c
        query = (
            select(
                columns.tenant_id,
                columns.currency,
                func.sum(columns.cost_high).label("high"),
                func.sum(columns.cost_low).label("low"),
                func.sum(columns.prompt_tokens + columns.completion_tokens).label("tokens"),
            )
            .where(columns.bucket == DAY, columns.start_at >= begin, columns.start_at < end)
            .group_by(columns.tenant_id, columns.currency)
        )
        if tenant_id is not None:
            query = query.where(columns.tenant_id == tenant_id)
        sums: dict[str, Used] = {}
        for row in connection.execute(query).all():
            used = sums.setdefault(row.tenant_id, Used())
            used.tokens += int(row.tokens)
            used.picos[row.currency] += int(row.high) * SPLIT + int(row.low)
        return sums

    def _bounds(self, kind: Kind, start: date) -> tuple[datetime, datetime]:
        if kind == "budget":
            return self._calendar.month_start(start), self._calendar.next_month_start(start)
        return self._calendar.day_start(start), self._calendar.next_day_start(start)


def _plan(row: RowMapping, default_currency: str) -> Plan | None:
    """Return the plan of a row of `tenants`, None when there is nothing to alert of. A limit of 0 is always reached."""
    limits: dict[Kind, int] = {}
    if row["monthly_budget_micros"]:
        limits["budget"] = row["monthly_budget_micros"] * PICOS_PER_MICRO
    if row["tokens_per_day"]:
        limits["tokens_per_day"] = row["tokens_per_day"]
    percents = PERCENTS_DEFAULT if row["alert_percents"] is None else tuple(sorted(row["alert_percents"]))
    if not limits or not percents:
        return None
    currency = row["currency"] or default_currency
    return Plan(tenant_id=row["id"], tenant_name=row["name"], currency=currency, limits=limits, percents=percents)


def _data(plan: Plan, period: Period, percent: int, used: int) -> dict[str, str | int]:
    """Return what the alert says."""
    tenant: dict[str, str | int] = {"tenant_id": plan.tenant_id, "tenant_name": plan.tenant_name, "percent": percent}
    if period.kind == "budget":
        return tenant | {
            "month": f"{period.start:%Y-%m}",
            "monthly_budget": plan.limits["budget"] // PICOS_PER_MICRO,
            "spent_picos": used,
            "currency": plan.currency,
        }
    return tenant | {"day": period.start.isoformat(), "tokens_per_day": plan.limits["tokens_per_day"], "tokens": used}
