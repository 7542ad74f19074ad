"""Limits of tenants and keys: parsed from forms, and shown with their current usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.base.money import PICOS_PER_MICRO
from appliance.console.formatting import budget, count, money_short
from appliance.console.forms import Form
from appliance.metering.limits.owners import Owner
from appliance.metering.usage import UsageFilter
from appliance.tenancy.fields import LIMIT_MAX
from appliance.tenancy.principals import ApiKey, Limits, Tenant

if TYPE_CHECKING:
    from appliance.serving.services import Services
    from appliance.tenancy.access import Access

_COUNTED = ("tokens_per_minute", "requests_per_minute", "concurrent_requests", "tokens_per_day")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The usage of a limit: as a fraction from 0 to 1, and as text."""

    label: str
    fraction: float
    text: str


def read_limits(form: Form) -> Limits:
    """Parse the limits in a form; an invalid field counts as no limit and gets a form error."""
    limits = {name: form.whole_number(name, most=LIMIT_MAX) for name in _COUNTED}
    return Limits(**limits, monthly_budget=form.amount_micros("monthly_budget"))


async def tenant_levels(services: Services, tenant: Tenant, *, access: Access) -> list[Level]:
    """Return the current usage of the tenant's limits."""
    periods = await _period_levels(services, tenant, tenant.limits, access=access)
    return [*_levels(services, Owner("tenant", tenant.id), tenant.limits), *periods]


async def key_levels(services: Services, tenant: Tenant, key: ApiKey, *, access: Access) -> list[Level]:
    """Return the current usage of the key's own limits."""
    periods = await _period_levels(services, tenant, key.limits, key_ids=[key.id], access=access)
    return [*_levels(services, Owner("key", key.id), key.limits), *periods]


async def _period_levels(
    services: Services, tenant: Tenant, limits: Limits, *, key_ids: Sequence[str] | None = None, access: Access
) -> list[Level]:
    """Return the usage of limits per day and month: settled usage in the tenant's currency, as in budget alerts."""
    if limits.tokens_per_day is None and limits.monthly_budget is None:
        return []
    calendar, now = services.reports.calendar, services.clock.now()
    month, today, end = calendar.month_start(now), calendar.day_start(now), calendar.next_day_start(now)
    filters = UsageFilter(tenant_ids=[tenant.id], key_ids=key_ids)
    days = await services.reports.usage(month, end, filters=filters, access=access)
    currency = tenant.currency or services.settings.currency
    levels = []
    if limits.tokens_per_day is not None:
        tokens = sum(day.prompt_tokens + day.completion_tokens for day in days if day.start == today)
        levels.append(_level("Tokens today", tokens, limits.tokens_per_day))
    if limits.monthly_budget is not None:
        spent_picos = sum(day.cost_picos for day in days if day.currency == currency)
        levels.append(_budget_level(spent_picos, limits.monthly_budget, currency))
    return levels


def _levels(services: Services, owner: Owner, limits: Limits) -> list[Level]:
    """Return the usage of limits per minute and on concurrency; usage above a limit is shown as full."""
    taken, levels = services.admission.in_use(owner), []
    if (tokens := limits.tokens_per_minute) is not None:
        levels.append(_level("Tokens per minute", min(taken.get("tokens", 0), tokens), tokens))
    if (requests := limits.requests_per_minute) is not None:
        levels.append(_level("Requests per minute", min(taken.get("requests", 0), requests), requests))
    if limits.concurrent_requests is not None:
        levels.append(_level("Concurrent requests", taken.get("concurrency", 0), limits.concurrent_requests))
    return levels


def _level(label: str, taken: int, limit: int) -> Level:
    return Level(label=label, fraction=_fraction(taken, limit), text=f"{count(taken)} of {count(limit)}")


def _budget_level(spent_picos: int, limit_micros: int, currency: str) -> Level:
    spent, limit = money_short(spent_picos, currency), budget(limit_micros, currency)
    return Level(
        label="Budget this month", fraction=_fraction(spent_picos, limit_micros * PICOS_PER_MICRO), text=f"{spent} of {limit}"
    )


def _fraction(taken: int, limit: int) -> float:
    """Return the used share; a limit of zero is always full."""
    return min(max(taken / limit, 0.0), 1.0) if limit else 1.0
