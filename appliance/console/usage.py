"""Usage and cost over a period, per day and by tenant, key or model. Reads only the reports.

Runs three queries, however many tenants there are: for the bars, the rows, and the names in the rows.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from litestar import Response, get

from appliance.base.clock import rfc3339
from appliance.base.errors import InvalidValue
from appliance.base.spreadsheet import escape_formulas
from appliance.console.charts import Column, columns
from appliance.console.context import ContextDependency
from appliance.console.rendering import Html
from appliance.console.tenant_names import tenant_names, tenants_by_name
from appliance.console.urls import build_url
from appliance.metering.calendar import BillingCalendar
from appliance.metering.usage import UsageFilter, UsageRow
from appliance.metering.usage_queries import Measure
from appliance.metering.usage_segments import bucket_end, bucket_start
from appliance.tenancy.access import Access

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.principals import Tenant

PERIODS = {"today": "Today", "7d": "7 days", "30d": "30 days", "month": "This month", "last-month": "Last month"}
GROUPS = {"tenant": "Tenant", "key": "Key", "model": "Model"}
MEASURES: dict[Measure, str] = {"tokens": "Tokens", "cost": "Cost", "requests": "Requests"}
ROWS_MAX = 100
CSV_ROWS_MAX = 50_000
COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The choices on the page, all in its URL. `bucket` is the interval of one bar."""

    period: str
    group: str
    measure: Measure
    tenant: str
    start: datetime
    end: datetime
    bucket: str

    @classmethod
    def of(cls, query: Mapping[str, str], now: datetime, calendar: BillingCalendar) -> View:
        """Parse the query string; invalid values are ignored."""
        period = query.get("period", "30d")
        period = period if period in PERIODS else "30d"
        group, measure = query.get("group", "tenant"), query.get("measure", "tokens")
        start, end = bounds(period, now, calendar)
        return cls(
            period=period,
            group=group if group in GROUPS else "tenant",
            measure=next((known for known in MEASURES if known == measure), "tokens"),
            tenant=query.get("tenant", ""),
            start=start,
            end=end,
            bucket="hour" if period == "today" else "day",
        )

    @property
    def filters(self) -> UsageFilter:
        """Return the filter for the queries."""
        return UsageFilter(tenant_ids=[self.tenant] if self.tenant else None)

    def url(self, path: str = "/usage", **changes: str) -> str:
        """Return the URL of this view with `changes`."""
        parameters = {"period": self.period, "group": self.group, "measure": self.measure, "tenant": self.tenant} | changes
        return build_url(path, **parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageLine:
    """One row of the table: its tenant, key or model, its counts, and its share of the measure shown, None for a cost in
    another currency than the one shown."""

    name: str
    note: str
    url: str | None
    usage: UsageRow
    share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Totals of the whole period; `costs` by currency, that of bars and shares first."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    costs: tuple[tuple[str, int], ...]


def bounds(period: str, now: datetime, calendar: BillingCalendar) -> tuple[datetime, datetime]:
    """Return start and end of a period, in the billing time zone."""
    end = calendar.next_day_start(now)
    if period == "month":
        return calendar.month_start(now), end
    if period == "last-month":
        first = calendar.month_start(now)
        return calendar.month_start(first - timedelta(hours=1)), first
    days = {"today": 1, "7d": 7, "30d": 30}[period]
    return calendar.day_start(calendar.day_of(now) - timedelta(days=days - 1)), end


@get("/usage")
async def show_usage(context: ContextDependency) -> Html:
    """The page; when a choice changes, htmx requests only the part below the title."""
    services, access = context.services, context.access
    view = View.of(context.query, services.clock.now(), services.reports.calendar)
    bars = await services.reports.usage(view.start, view.end, view.bucket, filters=view.filters, access=access)
    tenants = await tenants_by_name(services, access)
    sums = add_up(
        bars, _common_currency([tenant for tenant in tenants if view.tenant in ("", tenant.id)], services.settings.currency)
    )
    currency, _ = sums.costs[0]
    rows = await services.reports.totals(
        view.start,
        view.end,
        (view.group,),
        view.filters,
        rows_max=ROWS_MAX + 1,
        measure=view.measure,
        currency=currency,
        access=access,
    )
    names = await _names(services, view.group, rows, {tenant.id: tenant.name for tenant in tenants}, access)
    total = sum(measured_value(row, view.measure, currency) for row in bars)
    return context.page(
        "pages/usage.html",
        part="fragments/usage.html",
        view=view,
        sums=sums,
        bars=_bars(bars, view, services.reports.calendar, currency),
        lines=usage_lines(rows[:ROWS_MAX], names, view, currency, total=total),
        more=len(rows) > ROWS_MAX,
        tenants=tenants,
        periods=PERIODS,
        groups=GROUPS,
        measures=MEASURES,
        zone=services.settings.time_zone,
    )


@get("/usage.csv")
async def export_usage(context: ContextDependency) -> Response[str]:
    """The rows of the table as CSV: exact integers, costs in pico-units of their currency."""
    services, access = context.services, context.access
    view = View.of(context.query, services.clock.now(), services.reports.calendar)
    rows = await services.reports.totals(
        view.start, view.end, (view.group,), view.filters, rows_max=CSV_ROWS_MAX + 1, access=access
    )
    if len(rows) > CSV_ROWS_MAX:
        raise InvalidValue(f"the file would have more than {CSV_ROWS_MAX} rows: choose one tenant, or use /admin/v1/usage")
    tenants = await tenant_names(services, access)
    names = await _names(services, view.group, rows, tenants, access)
    text = await asyncio.to_thread(_csv, rows, view.group, names)
    disposition = f'attachment; filename="usage-{view.period}-by-{view.group}.csv"'
    return Response(text, media_type="text/csv; charset=utf-8", headers={"content-disposition": disposition})


def _common_currency(tenants: Sequence[Tenant], default: str) -> str:
    """Return the currency of all `tenants`; `default` if they have several, or there are no tenants."""
    currencies = {tenant.currency or default for tenant in tenants}
    return currencies.pop() if len(currencies) == 1 else default


def add_up(bars: Sequence[UsageRow], preferred: str) -> Sums:
    """Return the totals of all bars. Costs in `preferred` come first, also if there are no costs."""
    costs: dict[str, int] = {}
    for row in sorted(bars, key=lambda row: (row.currency != preferred, row.currency)):
        costs[row.currency] = costs.get(row.currency, 0) + row.cost_picos
    costs = {name: picos for name, picos in costs.items() if picos} or {preferred: 0}
    return Sums(
        requests=sum(row.requests for row in bars),
        prompt_tokens=sum(row.prompt_tokens for row in bars),
        cached_tokens=sum(row.cached_tokens for row in bars),
        completion_tokens=sum(row.completion_tokens for row in bars),
        costs=tuple(costs.items()),
    )


def owner_of(row: UsageRow, group: str) -> str:
    """Return the tenant id, key id or model of a row, depending on `group`."""
    owner = {"tenant": row.tenant_id, "key": row.key_id, "model": row.model}[group]
    assert owner is not None, "a grouped row names its group"
    return owner


def usage_lines(
    rows: Sequence[UsageRow], names: Mapping[str, tuple[str, str]], view: View, currency: str, *, total: int
) -> list[UsageLine]:
    """Return the rows of the table. Shares are fractions of `total`, the sum of all rows in the measure shown."""
    lines = []
    for row in rows:
        share = min(max(measured_value(row, view.measure, currency) / total, 0.0), 1.0) if total > 0 else 0.0
        is_comparable = view.measure != "cost" or row.currency == currency
        owner = owner_of(row, view.group)
        name, note = names.get(owner, (owner, ""))
        url = None if view.group == "model" else f"/{view.group}s/{owner}"
        lines.append(UsageLine(name=name, note=note, url=url, usage=row, share=share if is_comparable else None))
    return lines


def measured_value(row: UsageRow, measure: str, currency: str) -> int:
    """Return the value of a row in a measure; a cost in another currency than `currency` counts as zero."""
    if measure == "requests":
        return row.requests
    if measure == "cost":
        return row.cost_picos if row.currency == currency else 0
    return row.prompt_tokens + row.completion_tokens


def _bars(rows: Sequence[UsageRow], view: View, calendar: BillingCalendar, currency: str) -> list[Column]:
    """Return one bar per bucket of the period, empty ones too.

    Hours are UTC hours, as in the report: in a time zone with an offset of half an hour, the first and last hour of a day are
    cut, and the first is labelled with the start of the day.
    """
    amounts: dict[datetime, int] = {}
    for row in rows:
        amounts[row.start] = amounts.get(row.start, 0) + measured_value(row, view.measure, currency)
    label_format = "%H:%M" if view.bucket == "hour" else "%Y-%m-%d"
    bars: list[tuple[str, int]] = []
    moment = bucket_start(view.start, view.bucket, calendar)
    while moment < view.end:
        bars.append((calendar.local(max(moment, view.start)).strftime(label_format), amounts.get(moment, 0)))
        moment = bucket_end(moment, view.bucket, calendar)
    return columns(bars)


def _csv(rows: Sequence[UsageRow], group: str, names: Mapping[str, tuple[str, str]]) -> str:
    """Return the rows as CSV. CSV_ROWS_MAX of them take about a second, for which the event loop must not wait."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["start", "end", group, "name", *COUNTS, "cost_picos", "currency", "rejected_tokens"])
    for row in rows:
        owner = owner_of(row, group)
        name, _note = names.get(owner, (owner, ""))
        counts = [getattr(row, count) for count in COUNTS]
        period = [rfc3339(row.start), rfc3339(row.end)]
        owned_by = [escape_formulas(owner), escape_formulas(name)]
        table.writerow([*period, *owned_by, *counts, row.cost_picos, row.currency, row.rejected_tokens])
    return text.getvalue()


async def _names(
    services: Services, group: str, rows: Sequence[UsageRow], tenants: Mapping[str, str], access: Access
) -> dict[str, tuple[str, str]]:
    """Return (name, note) of the tenants or keys in `rows`, by id."""
    if group == "tenant":
        return {tenant_id: (name, "") for tenant_id, name in tenants.items()}
    if group == "model":
        return {}
    keys = await services.keys.named([row.key_id for row in rows if row.key_id is not None], access=access)
    return {key.id: (key.name, f"{key.prefix}… of {tenants.get(key.tenant_id, key.tenant_id)}") for key in keys}
