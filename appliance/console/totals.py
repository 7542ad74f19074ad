"""Usage totals from the ledger for the tiles at the top of pages. Knows no page."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from appliance.metering.usage import UsageFilter, UsageRow

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.access import Access


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageTotals:
    """Usage and cost of a period. `cost_picos` is in the requested currency; `other_costs` are amounts in other currencies."""

    requests: int = 0
    tokens: int = 0
    cost_picos: int = 0
    other_costs: tuple[tuple[str, int], ...] = ()


async def totals_today(
    services: Services, tenant_id: str | None = None, *, currency: str | None = None, access: Access
) -> UsageTotals:
    """Return the totals since the start of the billing day, of one tenant or of all visible ones."""
    start = services.reports.calendar.day_start(services.clock.now())
    return await totals_since(services, start, tenant_id, currency=currency, access=access)


async def totals_this_month(services: Services, tenant_id: str, *, currency: str | None = None, access: Access) -> UsageTotals:
    """Return the totals of a tenant since the start of the billing month, as for its budget and invoice."""
    start = services.reports.calendar.month_start(services.clock.now())
    return await totals_since(services, start, tenant_id, currency=currency, access=access)


async def costs_this_month(services: Services, tenant_ids: Collection[str], *, access: Access) -> dict[str, list[UsageRow]]:
    """Return the cost of these tenants since the start of the billing month, one row per currency; no rows without usage."""
    now = services.clock.now()
    rows = await services.reports.totals(
        services.reports.calendar.month_start(now),
        now + timedelta(seconds=1),
        ("tenant",),
        UsageFilter(tenant_ids=tenant_ids),
        access=access,
    )
    costs: dict[str, list[UsageRow]] = {}
    for row in rows:
        assert row.tenant_id is not None, "a grouped row names its group"
        costs.setdefault(row.tenant_id, []).append(row)
    return costs


async def totals_since(
    services: Services, start: datetime, tenant_id: str | None, *, currency: str | None = None, access: Access
) -> UsageTotals:
    """Return the totals of settled usage admitted since `start`. `currency` None is the appliance's currency."""
    end = services.clock.now() + timedelta(seconds=1)
    filters = UsageFilter(tenant_ids=None if tenant_id is None else [tenant_id])
    rows = await services.reports.usage(start, end, filters=filters, access=access)
    costs: dict[str, int] = {}
    for row in rows:
        costs[row.currency] = costs.get(row.currency, 0) + row.cost_picos
    return UsageTotals(
        requests=sum(row.requests for row in rows),
        tokens=sum(row.prompt_tokens + row.completion_tokens for row in rows),
        cost_picos=costs.pop(currency or services.settings.currency, 0),
        other_costs=tuple((currency, picos) for currency, picos in sorted(costs.items()) if picos),
    )
